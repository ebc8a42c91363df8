"""Work, depth and average parallelism of programs: by the rules of an algorithm's cost, and of a model's layers."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxpar.plan.model.work_depth import WorkDepth, work_depth

SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ROW = jax.ShapeDtypeStruct((100,), jnp.float32)


def levels(*widths):
    """A graph of scalar additions, each of two of the level before it."""

    def run(*numbers):
        for width in widths:
            numbers = [numbers[i % len(numbers)] + numbers[(i + 1) % len(numbers)] for i in range(width)]
        return numbers

    return run


def test_a_graph_of_39_operations_on_7_levels_keeps_5_and_a_half_processors_busy():
    found = work_depth(levels(8, 8, 8, 6, 5, 3, 1), *[1.0] * 9)
    assert (found.work, found.depth) == (39, 7)
    assert found.parallelism == pytest.approx(5.57, abs=0.005)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_products_one_after_the_other_are_as_deep_as_they_are_many(count):
    def chain(x, *weights):
        for weight in weights:
            x = x @ weight
        return x

    each = WorkDepth(2 * 8**3, 1 + 3)
    assert work_depth(chain, SQUARE, *[SQUARE] * count) == WorkDepth(count * each.work, count * each.depth)
    beside = work_depth(lambda *pairs: [a @ a for a in pairs], *[SQUARE] * count)
    assert beside == WorkDepth(count * each.work, each.depth)


def turns(body):
    return lambda x: jax.lax.scan(lambda x, _: (body(x), None), x, length=6)[0]


@pytest.mark.parametrize(
    ("function", "work", "depth"),
    [
        (lambda x: jnp.sin(x) + x, 200, 2),
        (jnp.sum, 99, 7),
        (lambda x: x.reshape(10, 10).max(0), 90, 4),
        (jnp.cumsum, 700, 7),
        (lambda x: x.reshape(4, 25).T.astype(jnp.bfloat16)[1:], 0, 0),
        (turns(jnp.sin), 600, 6),
        (turns(turns(jnp.sin)), 3600, 36),
        (jax.jit(lambda x: jnp.sin(jax.checkpoint(jnp.cos)(x))), 200, 2),
        (jax.nn.relu, 100, 1),
    ],
    ids=["elements", "sum", "max", "sums so far", "moves", "scan", "scan of scans", "calls", "custom rule"],
)
def test_every_kind_of_operation_counts_by_its_rule(function, work, depth):
    assert work_depth(function, ROW) == WorkDepth(work, depth)


def test_a_conditional_counts_as_its_larger_branch_and_an_open_loop_once():
    wide, deep = (lambda x: jnp.zeros_like(x) + jnp.sum(jnp.outer(x, x))), turns(jnp.sin)
    branches = [work_depth(branch, ROW) for branch in (wide, deep)]
    assert work_depth(lambda n, x: jax.lax.cond(n, wide, deep, x), True, ROW) == WorkDepth(
        max(each.work for each in branches), max(each.depth for each in branches)
    )
    found = work_depth(lambda x: jax.lax.while_loop(lambda x: x[0] < 1, lambda x: jnp.sin(x), x), ROW)
    assert found == WorkDepth(101, 2, unknown=True)


def test_a_call_lets_through_what_does_not_wait_for_all_of_its_arguments():
    both = jax.jit(lambda x, y: (jnp.sin(x), jnp.cos(y)))

    def run(x, y):
        late, early = both(turns(jnp.sin)(x), y)
        return late, jnp.exp(early)

    assert work_depth(run, ROW, ROW) == WorkDepth(900, 7)
    assert work_depth(lambda x, y: jnp.exp(run(x, y)[1]), ROW, ROW).depth == 7  # what nobody reads is done all the same


def test_devices_of_a_shard_map_work_at_once():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    assert work_depth(split, jax.ShapeDtypeStruct((100,), jnp.float32)) == WorkDepth(100, 1)


def test_a_sum_is_a_tree():
    for count in (2, 3, 64, 65):
        found = work_depth(jnp.sum, jax.ShapeDtypeStruct((count,), jnp.float32))
        assert found == WorkDepth(count - 1, math.ceil(math.log2(count)))
