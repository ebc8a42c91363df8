"""What travels, by hand, beside what XLA's GPU compiler made of it: bytes per step and mesh axis, to 0.2 %.

Each technique alone has a row in tests/contracts/layout_table.py; here are their products, precision and remat.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.mesh.target import missing_plugin

pytestmark = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
L, D, V, S, HEADS = 4, 256, 1024, 128, 8
EXACT = {"rel": 2e-3}


def report(parallel, *, target="1x8", rows=16, dim=D, vocab=V, heads=HEADS, scan=True, **numerics):
    settings = jp.DecoderConfig(vocab=vocab, seq=S, layers=L, dim=dim, heads=heads, hidden=2 * dim, scan=scan)
    layout = jp.compose(partial(jp.Decoder, settings), parallel, jp.target_devices(f"h100:{target}"))
    step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3), **numerics)
    return jp.inspect(step, {name: jax.ShapeDtypeStruct((rows, S), jnp.int32) for name in ("inputs", "targets")})


class Sizes:
    """Bytes of one layer, of a table, of a norm, of all; of one replica's activation, of a statistic of it."""

    def __init__(self, *, dim=D, vocab=V, rows=16, item=4):
        self.layer = item * (4 * dim * dim + 3 * dim * 2 * dim + 2 * dim)
        self.table, self.norm = item * vocab * dim, item * dim
        self.all = L * self.layer + 2 * self.table + self.norm
        self.activation, self.statistic = item * rows * S * dim, 4 * rows * S


def payloads(found):
    """Returns axes and kind to payload bytes of a step, scalars left out."""
    sums = {}
    for entry in found.ledger:
        if entry.payload > 64:
            key = (entry.axis, entry.kind)
            sums[key] = sums.get(key, 0) + entry.step_payload
    return sums


def check(found, expected):
    got = payloads(found)
    assert got.keys() == expected.keys(), got
    for key, size in expected.items():
        assert got[key] == pytest.approx(size, **EXACT), key


SIZE = Sizes()


@pytest.mark.full
def test_zero_3_gathers_layers_that_are_not_scanned_outside_of_loops():
    found = report(jp.Parallel(fsdp=8), scan=False)
    check(found, {("fsdp", "reduce-scatter"): SIZE.all, ("fsdp", "all-gather"): SIZE.all})
    layers = [entry for entry in found.ledger if entry.kind == "all-gather" and "blocks" in entry.cause]
    assert {entry.loop for entry in layers} == {()}


@pytest.mark.slow
def test_zero_3_with_remat_gathers_the_layers_twice():
    twice = SIZE.all + L * (SIZE.layer - 2 * SIZE.norm)  # the scales of their norms are gathered once, for all layers
    check(
        report(jp.Parallel(fsdp=8), remat="full"), {("fsdp", "reduce-scatter"): SIZE.all, ("fsdp", "all-gather"): twice}
    )


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.full), 2])
def test_hsdp_scatters_within_a_replica_and_reduces_the_shards_between_them(zero):
    found = report(jp.Parallel(data=2, fsdp=4, zero=zero))
    got = payloads(found)
    assert got["fsdp", "reduce-scatter"] == pytest.approx(SIZE.all, **EXACT)
    assert got["data", "all-reduce"] == pytest.approx(SIZE.all / 4, **EXACT)
    assert got["fsdp", "all-gather"] == pytest.approx(SIZE.all, **EXACT)
    assert not found.flags


@pytest.mark.nightly
def test_tensor_parallel_with_full_remat_reduces_five_a_layer():
    found = report(jp.Parallel(tensor=8), remat="full")
    jp.assert_collectives(found, {"tensor": {"all-reduce": 5 * L + 1, "all-gather": 1}}, at_least=SIZE.activation)


@pytest.mark.slow
def test_context_and_fsdp_reduce_no_gradient_whole():
    found = report(jp.Parallel(fsdp=4, context=2))
    got = payloads(found)
    assert got["fsdp", "reduce-scatter"] == pytest.approx(SIZE.all, **EXACT)
    assert got["context", "all-reduce"] == pytest.approx(SIZE.all / 4, **EXACT)
    assert got["fsdp", "all-gather"] == pytest.approx(SIZE.all, **EXACT)


@pytest.mark.nightly
def test_tensor_and_data_divide_the_bytes_between_them():
    found = report(jp.Parallel(data=2, tensor=4))
    sharded = (SIZE.all - (2 * L + 1) * SIZE.norm) / 4 + (2 * L + 1) * SIZE.norm
    got = payloads(found)
    assert got["data", "all-reduce"] == pytest.approx(sharded, **EXACT)
    assert got["tensor", "all-reduce"] == pytest.approx((4 * L + 1) * SIZE.activation / 2, **EXACT)
    assert got["tensor", "all-gather"] == pytest.approx((SIZE.activation + 4 * 2 * SIZE.statistic) / 2, **EXACT)


MATRICES = ("attention/query", "attention/key", "attention/value", "attention/out", "mlp/up", "mlp/gate", "mlp/down")


@pytest.mark.slow
def test_bf16_halves_what_zero_3_moves_and_layers_are_gathered_inside_their_loop():
    found = report(jp.Parallel(fsdp=8), precision="bf16")
    check(found, {("fsdp", "reduce-scatter"): SIZE.all / 2, ("fsdp", "all-gather"): SIZE.all / 2})
    assert {entry.dtype for entry in found.ledger if entry.payload > 64} == {"bf16"}
    layers = [entry for entry in found.ledger if entry.kind == "all-gather" and "blocks" in entry.cause]
    assert all(entry.loop == (() if "norm" in entry.cause else (L,)) for entry in layers)
    assert {entry.cause for entry in layers if entry.payload > 4096} == {f"blocks/{name}" for name in MATRICES}


@pytest.mark.nightly
def test_bf16_halves_what_tensor_parallel_moves():
    found = report(jp.Parallel(tensor=8), precision="bf16")
    gathered = SIZE.activation / 2 + 8 * 2 * SIZE.statistic
    check(found, {("tensor", "all-reduce"): (4 * L + 1) * SIZE.activation / 2, ("tensor", "all-gather"): gathered})


@pytest.mark.nightly
def test_accumulation_under_zero_1_reduces_layers_every_microbatch_and_gathers_once():
    got = payloads(report(jp.Parallel(fsdp=8, zero=1), accumulate=2))
    assert got["fsdp", "all-gather"] == pytest.approx(SIZE.all, **EXACT)  # parameters, before the loop
    # of the table, the head and the last norm XLA adds up microbatches first, and scatters them once; not of
    # the layers, which a loop goes over. A large head's gradient a barrier would ask for at once
    sums = 2 * L * SIZE.layer + 2 * SIZE.table + SIZE.norm
    assert got["fsdp", "all-reduce"] + got["fsdp", "reduce-scatter"] == pytest.approx(sums, **EXACT)


@pytest.mark.slow
def test_accumulation_under_zero_3_scatters_every_microbatch_and_says_so():
    found = report(jp.Parallel(fsdp=8), accumulate=2, remat="full")
    got = payloads(found)
    assert got["fsdp", "reduce-scatter"] == pytest.approx(2 * SIZE.all, **EXACT)
    hoisted = SIZE.all - L * SIZE.layer  # jax 0.12 gathers what every microbatch reads alike before the loop
    scales = 2 * L * SIZE.norm  # of the norms of all layers, which a microbatch gathers once
    often = got["fsdp", "all-gather"] - 4 * (L * SIZE.layer - scales) - 2 * scales
    assert often == pytest.approx(2 * hoisted, **EXACT) or often == pytest.approx(hoisted, **EXACT)
    assert [flag.kind for flag in found.flags] == ["per microbatch"]


def test_a_ring_of_permutes_counts_every_turn():
    mesh = Mesh(np.array(jp.target_devices("h100:1x8")), ("ring",), axis_types=(AxisType.Auto,))
    turns, size = 7, 8 * 1024

    def ring(x):
        def turn(carry, _):
            x, total = carry
            x = jax.lax.ppermute(x, "ring", [(i, (i + 1) % 8) for i in range(8)])
            return (x, total + x), None

        (_, total), _ = jax.lax.scan(turn, (x, x), None, length=turns)
        return total

    step = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=P("ring"), out_specs=P("ring")))
    found = jp.inspect(step, jax.ShapeDtypeStruct((8 * size,), jnp.float32, sharding=NamedSharding(mesh, P("ring"))))
    check(found, {("ring", "collective-permute"): turns * 4 * size})
    jp.assert_collectives(found, {"ring": {"collective-permute": turns}})
    assert sum(entry.step_wire for entry in found.ledger) == turns * 4 * size


@pytest.mark.parametrize(
    "target",
    [pytest.param("8x8", id="64", marks=pytest.mark.full), pytest.param("128x8", id="1024", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("data", marks=pytest.mark.full),
        pytest.param("zero2", marks=pytest.mark.slow),
        pytest.param("zero3", marks=pytest.mark.full),
        pytest.param("tensor x fsdp", marks=pytest.mark.full),
    ],
)
def test_theory_holds_on_many_gpus(target, way):
    nodes = int(target.split("x")[0])
    n, rows, dim, vocab, heads = 8 * nodes, 8 * nodes, 1024, 4096, 8
    size = Sizes(dim=dim, vocab=vocab, rows=rows)
    given = {"target": target, "rows": rows, "dim": dim, "vocab": vocab, "heads": heads}
    if way == "data":
        check(report(jp.Parallel(data=n), **given), {("data", "all-reduce"): size.all})
    elif way == "zero2":
        found = report(jp.Parallel(fsdp=n, zero=2), **given)
        check(found, {("fsdp", "reduce-scatter"): size.all, ("fsdp", "all-gather"): size.all})
    elif way == "zero3":
        found = report(jp.Parallel(fsdp=n), remat="full", precision="bf16", **given)
        twice = size.all + L * size.layer
        check(found, {("fsdp", "reduce-scatter"): size.all / 2, ("fsdp", "all-gather"): twice / 2})
    else:
        found = report(jp.Parallel(fsdp=nodes, tensor=8), **given)
        sent = {"all-reduce": 4 * L + 1, "all-gather": 1}
        jp.assert_collectives(found, {"tensor": sent}, at_least=size.activation // nodes)
        got = payloads(found)
        split = (size.all - (2 * L + 1) * size.norm) / 8 + (2 * L + 1) * size.norm
        assert got["fsdp", "reduce-scatter"] == pytest.approx(split, **EXACT)
        assert got["fsdp", "all-gather"] == pytest.approx(split, **EXACT)
