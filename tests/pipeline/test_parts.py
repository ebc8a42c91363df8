"""What a pipeline is made of, each on its own: halves of a backward, the deal of layers, the program of a table."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import some
from test_schedule import grid

from jaxpar.hlo.flop import forward_flop
from jaxpar.jaxprs.split_backward import halves
from jaxpar.models.remat import remat
from jaxpar.models.settings.computing import POLICIES
from jaxpar.pipeline.run.parameter_moves import permutation_rounds, redistribute_layers
from jaxpar.pipeline.run.tick_program import COLUMNS, OP_NUMBER, TickKind, program
from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.pipeline.tables.schedule import StageCut

# --- halves ---------------------------------------------------------------------------------------------------------

LAYERS, ROWS, DIM, HIDDEN = 3, 4, 6, 10


def attention(params, x):
    """[rows, dim]: each row looks at all others."""
    q, k, v = x @ params["q"], x @ params["k"], x @ params["v"]
    return x + jax.nn.softmax(q @ k.T / 2) @ v


def feed(params, x):
    y = (x - x.mean(-1, keepdims=True)) * params["scale"]
    return x + jax.nn.gelu(y @ params["up"]) @ params["up"].T  # one matrix, read twice


def layer(params, x):
    return feed(params, attention(params, x))


def parameters(key=0):
    shapes = {"q": (DIM, DIM), "k": (DIM, DIM), "v": (DIM, DIM), "scale": (DIM,), "up": (DIM, HIDDEN)}
    keys = jax.random.split(jax.random.key(key), len(shapes))
    return {n: jax.random.normal(k, (LAYERS, *s)) / 2 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def scan(params, known, x, *, policy="none"):
    body = remat(layer, policy, prevent_cse=False)
    return jax.lax.scan(lambda x, one: (body(one, x), None), x, params)[0]


def unrolled(params, known, x, *, policy="none"):
    body = remat(layer, policy)
    for i in range(LAYERS):
        x = body(jax.tree.map(lambda leaf, i=i: leaf[i], params), x)
    return x


def shared(params, known, x):
    """A matrix from outside of the loop: its gradient is summed in the carry of the backward loop."""

    def body(carry, one):
        x, aux = carry
        y = jnp.tanh(feed(one, x) @ params["q"][0]) * known
        return (y, aux + jnp.square(y).sum(-1, keepdims=True)), None

    (x, aux), _ = jax.lax.scan(body, (x, jnp.zeros((x.shape[0], 1))), params)
    return x * aux


def mixed(params, known, x):
    """Both gradients follow from the same products, and what comes last needs no parameter."""
    for i in range(LAYERS):
        w = params["up"][i] @ params["up"][i].T
        x = jnp.sin(x @ w @ w * params["scale"][i] + x)
    return jnp.cumsum(x, axis=-1)


def nested(params, known, x):
    """A loop inside a loop."""

    def outer(x, one):
        return jax.lax.scan(lambda x, _: (jnp.tanh(feed(one, x)), None), x, None, length=2)[0], None

    return jax.lax.scan(outer, x, params)[0]


PLACED = [policy for policy in POLICIES if policy != "offload"]  # which a step places, and a pipeline refuses
STAGES = {f"scan, {policy}": partial(scan, policy=policy) for policy in PLACED}
STAGES |= {f"unrolled, {policy}": partial(unrolled, policy=policy) for policy in PLACED}
STAGES |= {"shared": shared, "mixed": mixed, "nested": nested}


def example(rows=ROWS):
    x, g = jax.random.normal(jax.random.key(7), (2, rows, DIM))
    return parameters(), jnp.float32(0.7), x, g


@cache
def made(name, rows=ROWS):
    params, known, x, _ = example(rows)
    return halves(STAGES[name], params, known, x, split=True)


def size(arrays):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


def assert_halves_make_a_backward(stage, cut, params, known, x, g):
    @jax.jit
    def apart(params, x, g):
        y, kept = cut.forward(params, known, x)
        dx, stash = cut.input_grad(params, known, x, kept, g)
        return y, cut.weight_grad(params, known, stash), dx, *cut.backward(params, known, x, kept, g)

    @jax.jit
    def whole(params, x, g):
        y, pull = jax.vjp(lambda params, x: stage(params, known, x), params, x)
        return y, *pull(g)

    y, dparams, dx, *together = apart(params, x, g)
    want = whole(params, x, g)
    assert_close((y, dparams, dx), want)
    assert_close(together, want[1:])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", some(STAGES, ["mixed"], ["scan, all_dots", "scan, full", "unrolled, none", "shared", "nested"])
)
def test_b_and_w_make_the_backward(name):
    assert_halves_make_a_backward(STAGES[name], made(name), *example())


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", some(STAGES, ["scan, all_dots", "unrolled, dots", "nested"]))
def test_b_and_w_multiply_as_much_as_the_backward(name):
    """To the FLOP: no product is made twice, and none that B needs not is made in B."""
    cut, (params, known, x, g) = made(name), example()
    b = forward_flop(cut.input_grad, params, known, x, cut.residuals, g)
    w = forward_flop(cut.weight_grad, params, known, cut.stash)
    backward = forward_flop(cut.backward, params, known, x, cut.residuals, g)
    forward = forward_flop(cut.forward, params, known, x)
    assert b + w == backward
    assert 0 < w < backward or name == "nested"  # a loop inside a loop is not cut: all of it is B's
    if "none" in name or name in ("shared", "nested"):

        def whole(params, x, g):
            _, pull = jax.vjp(lambda params, x: STAGES[name](params, known, x), params, x)
            return pull(g)

        def inputs(params, x, g):
            _, pull = jax.vjp(lambda x: STAGES[name](params, known, x), x)
            return pull(g)

        assert forward + backward == forward_flop(whole, params, x, g)
        assert forward + b == forward_flop(inputs, params, x, g) or name == "nested"


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["none", "full"])
def test_compiled_halves_compute_as_much_as_the_backward(policy):
    """With what is elementwise, as XLA counts it; loops it would count once."""
    cut, (params, known, x, g) = made(f"unrolled, {policy}"), example()

    def flop(function, *args):
        return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]

    both = flop(cut.input_grad, params, known, x, cut.residuals, g) + flop(cut.weight_grad, params, known, cut.stash)
    assert both == pytest.approx(flop(cut.backward, params, known, x, cut.residuals, g), rel=0.03)


COPIED = pytest.mark.xfail(strict=True, reason="a loop stacks what follows from its parameters alone, such as w.T")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=COPIED) if n in ("scan, none", "shared", "nested") else n for n in STAGES]
)
def test_what_is_kept_holds_no_parameter(name):
    """Twice the rows are twice the bytes: nothing is kept whose size the rows do not decide.

    Scores of attention are rows x rows, so they are left out.
    """
    sizes = [
        size([leaf for leaf in made(name, rows).residuals if leaf.shape[-2:] != (rows, rows)]) for rows in (16, 32)
    ]
    assert sizes[1] == 2 * sizes[0] > 0


@pytest.mark.parametrize("way", ["scan", "unrolled"])
def test_remat_decides_how_much_is_kept(way):
    kept = {policy: size(made(f"{way}, {policy}").residuals) for policy in PLACED}
    assert kept["full"] < kept["dots"] <= kept["all_dots"] < kept["none"]
    inputs = LAYERS - (way == "unrolled")  # the first layer's is the stage's, which is there already
    assert kept["full"] == 4 * ROWS * DIM * inputs


OPS = {
    "matrix": lambda w, s, x, first: jnp.tanh(x @ w),
    "twice": lambda w, s, x, first: (x @ w) * (x @ w.T),
    "scale": lambda w, s, x, first: x * s,
    "skip": lambda w, s, x, first: x + first,
    "norm": lambda w, s, x, first: x / (1 + jnp.abs(x).sum(-1, keepdims=True)) + s,
    "free": lambda w, s, x, first: jnp.sin(x),
    "weights only": lambda w, s, x, first: x + jnp.sin(w @ w).sum(0),
    "loop": lambda w, s, x, first: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w) + x * s, x), x, None, length=2)[0],
}


@pytest.mark.nightly
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 1)), min_size=1, max_size=5))
def test_halves_of_any_network_make_its_backward(ops):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(keys[0], (2, 3, 3)), "s": jax.random.normal(keys[1], (2, 3))}
    x, g = jax.random.normal(keys[2], (2, 2, 3))

    def stage(params, known, x):
        first = x
        for name, which in ops:
            x = OPS[name](params["w"][which], params["s"][which], x, first)
        return x

    cut = halves(stage, params, (), x, split=True)
    assert_halves_make_a_backward(stage, cut, params, (), x, g)
    flop = [
        forward_flop(cut.input_grad, params, (), x, cut.residuals, g),
        forward_flop(cut.weight_grad, params, (), cut.stash),
        forward_flop(cut.backward, params, (), x, cut.residuals, g),
    ]
    assert flop[0] + flop[1] == flop[2]


# --- the deal -------------------------------------------------------------------------------------------------------

CUTS = [StageCut(stages, 1, chunks) for stages in (2, 3, 4, 8) for chunks in (1, 2, 3, 4)]
CUTS += [StageCut(stages, 1, 2, "v") for stages in (2, 3, 4, 8)]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "cut", some(CUTS, [CUTS[9], CUTS[12]]), ids=lambda cut: f"{cut.stages} x {cut.chunks} {cut.placement}"
)
def test_layers_are_dealt_to_the_stages_that_run_them_and_back(cut):
    mesh = Mesh(np.array(jax.devices()[: cut.stages]), ("pipe",))
    each = 2  # layers of a part
    layers = {"number": jnp.arange(cut.parts * each), "wide": jnp.arange(cut.parts * each * 3.0).reshape(-1, 3)}
    layers = jax.device_put(layers, NamedSharding(mesh, P("pipe")))
    dealt = jax.jit(lambda layers: redistribute_layers(mesh, cut, layers))(layers)
    got = np.asarray(dealt["number"]).reshape(cut.stages, cut.chunks, each)
    for part in range(cut.parts):
        stage, chunk = cut.locate(part)
        assert got[stage, chunk].tolist() == list(range(part * each, (part + 1) * each))
    back = jax.jit(lambda layers: redistribute_layers(mesh, cut, layers, reverse=True))(dealt)
    assert jax.tree.map(lambda a, b: bool((a == b).all()), back, layers) == {"number": True, "wide": True}


@pytest.mark.parametrize("chunks", range(1, 9))
def test_every_round_of_the_deal_is_a_permutation(chunks):
    for stages, placement in itertools.product(range(1, 17), ["ring", "v"] if chunks == 2 else ["ring"]):
        cut = StageCut(stages, 1, chunks, placement)
        found = permutation_rounds(cut)
        assert len(found) == chunks
        assert sorted(part for parts in found for part in parts) == list(range(cut.parts))
        for parts in found:
            assert sorted(part // chunks for part in parts) == list(range(stages))  # who stores it
            assert sorted(cut.locate(part)[0] for part in parts) == list(range(stages))  # who runs it


# --- the program of a table -----------------------------------------------------------------------------------------

TABLES = list(grid(stages=(1, 2, 3, 4, 5), microbatches=(1, 2, 3, 4, 6, 9, 12), chunks=(1, 2, 3)))


def table(name, stages, microbatches, chunks):
    return schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)


def expanded(loops):
    for loop in loops:
        for _ in range(loop.repeats):
            for each in loop.body:
                yield from [each] if isinstance(each, TickKind) else expanded([each])


def replay(made, *, forward_only=False):
    """An interpreter on symbols: runs the rows as any executor must, and checks every read.

    A value is what an op is to be given: ("x" or "g", microbatch, part), or what one op leaves for another. A stage
    that does not run the op of a tick writes "unused" into its slot of the op's pool, unless such writes are masked.
    """
    plan = made.schedule
    names, last = {number: op for op, number in OP_NUMBER.items()}, plan.parts - 1
    pools = [{"messages": {}, "residuals": {}, "stash": {}} for _ in range(plan.stages)]
    done = []
    for tick, kind in enumerate(expanded(made.loops)):
        writes = []
        for stage in range(plan.stages):
            row = dict(zip(COLUMNS, made.rows[tick, stage].tolist(), strict=True))
            op, microbatch, part, pool = names[row["op"]], row["microbatch"], row["part"], pools[stage]
            for writer, name, count in (("F", "residuals", made.residual_slots), ("B", "stash", made.stash_slots)):
                if count and writer in kind.ops and op != writer and name not in made.masked_pools:
                    writes.append((stage, name, row[name], "unused"))
            if op is None:
                continue
            assert op in kind.ops
            assert plan.locate(part) == (stage, row["chunk"])
            done.append((op, microbatch, part))
            if op in "FB" and part:
                assert pool["messages"][row["x"]] == ("x", microbatch, part)
            if op in "FB" and not part:
                assert kind.first
            if op == "F" and part == last:
                assert kind.last
            if op == "F" and not forward_only:
                writes.append((stage, "residuals", row["residuals"], ("residuals", microbatch, part)))
            if op == "B":
                assert pool["messages"][row["g"]] == ("g", microbatch, part)
                assert pool["residuals"][row["residuals"]] == ("residuals", microbatch, part)
            if op == "B" and plan.split:
                writes.append((stage, "stash", row["stash"], ("stash", microbatch, part)))
            if op == "W":
                assert pool["stash"][row["stash"]] == ("stash", microbatch, part)
            out = {
                "F": ("x", microbatch, part + 1) if part < last else ("g", microbatch, part),
                "B": ("g", microbatch, part - 1) if part else None,
                "W": None,
            }[op]
            for way, pairs in (("right", made.right), ("left", made.left), ("self_send", ((stage, stage),))):
                for origin, to in pairs:
                    slot = made.rows[tick, to, COLUMNS.index(way)]
                    if origin == stage and slot >= 0:
                        assert getattr(kind, way)
                        assert out is not None
                        writes.append((to, "messages", int(slot), out))
        places = [write[:3] for write in writes]
        assert len(set(places)) == len(places), f"two writes to one slot in tick {tick}"
        for stage, name, slot, value in writes:
            assert (
                0
                <= slot
                < {"messages": made.message_slots, "residuals": made.residual_slots, "stash": made.stash_slots}[name]
            )
            pools[stage][name][slot] = value
    return done


def test_idle_stages_have_free_slots_unless_all_forwards_precede():
    for name, masked in (
        ("gpipe", {"residuals"}),
        ("1f1b_phased", set()),
        ("interleaved_phased", set()),
        ("zb_h2", set()),
    ):
        chunks = 2 if name == "interleaved_phased" else 1
        assert program(table(name, 4, 8, chunks)).masked_pools == masked, name
    assert program(table("1f1b_phased", 4, 4, 1)).masked_pools == {
        "residuals"
    }  # too few microbatches: all are in flight


@pytest.mark.spread(0)
@pytest.mark.parametrize("name", some(LIBRARY, ["gpipe", "1f1b", "1f1b_phased"]))
def test_rows_give_every_op_what_it_needs(name):
    count = 0
    for each in TABLES:
        if each[0] == name:
            plan = table(*each)
            done = replay(program(plan))
            assert sorted(done) == sorted((c.op, c.microbatch, plan.part(stage, c.chunk)) for _, stage, c in plan)
            assert all(op == "F" for op, _, _ in replay(program(plan, forward_only=True), forward_only=True))
            count += 1
    assert count >= 10


def most(spans):
    """Returns how many are alive at once: written at the end of one tick, last read in another."""
    return max((sum(start < tick <= end for start, end in spans) for _, tick in spans), default=0)


def lifetimes(plan, stage):
    """Returns the spans of what a stage holds: received or handed to itself, kept, stashed."""
    at = {(cell.op, cell.microbatch, plan.part(on, cell.chunk)): tick for tick, on, cell in plan}
    mail, kept, stash = [], [], []
    for (op, microbatch, part), tick in at.items():
        if plan.locate(part)[0] != stage:
            continue
        if op == "F":
            kept.append((tick, at["B", microbatch, part]))
            if part:
                mail.append((at["F", microbatch, part - 1], at["B", microbatch, part]))
        elif op == "B":
            mail.append((at.get(("B", microbatch, part + 1), at["F", microbatch, plan.parts - 1]), tick))
            if plan.split:
                stash.append((tick, at["W", microbatch, part]))
    return mail, kept, stash


@pytest.mark.nightly
def test_pools_are_as_large_as_the_most_that_is_alive():
    for each in TABLES:
        plan = table(*each)
        made, alive = program(plan), [lifetimes(plan, stage) for stage in range(plan.stages)]
        mail, kept, stash = (max(map(most, spans)) for spans in zip(*alive, strict=True))
        assert (made.message_slots, made.residual_slots, made.stash_slots) == (mail, kept, stash), each
        assert stash == max(plan.stash), each
        if not plan.split:
            assert made.residual_slots == max(plan.peak), each


@pytest.mark.nightly
def test_loops_spell_the_ticks_in_order():
    for each in TABLES:
        plan = table(*each)
        kinds = list(expanded(program(plan).loops))
        assert len(kinds) == plan.ticks
        for kind, row in zip(kinds, plan.cells, strict=True):
            if plan.phased:
                assert kind.ops == {cell.op for cell in row if cell}, each
        assert plan.phased or len(set(kinds)) == 1


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpipe", marks=pytest.mark.slow),
        "1f1b_phased",
        pytest.param("interleaved_phased", marks=pytest.mark.slow),
        pytest.param("looped_bfs", marks=pytest.mark.slow),
    ],
)
def test_bodies_to_compile_do_not_grow_with_microbatches(name, stages):
    """From about three times the stages on: with fewer a table has no middle that repeats."""
    counts = [count * max(1, stages // 4) for count in (16, 32, 64)]
    tables = [schedule(name, stages=stages, microbatches=count) for count in counts]
    bodies = {sum(loop.bodies for loop in program(plan).loops) for plan in tables}
    assert len(bodies) == 1
    assert bodies.pop() <= 21


@pytest.mark.parametrize("name", [name for name in LIBRARY if not schedule(name, stages=4, microbatches=8).phased])
def test_a_table_that_mixes_kinds_has_one_body(name):
    assert sum(loop.bodies for loop in program(schedule(name, stages=4, microbatches=16)).loops) == 1
