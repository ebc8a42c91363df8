"""The promise over `pipe`: losses and parameters after five steps equal one device, whatever the schedule.

EACH    in CI, some of them: each schedule and each mesh once
PAIRS   marked full beyond EACH: what is needed for each pair of schedule and keep, schedule and stages, keep and mesh
CASES   marked full beyond EACH: schedules x keep x meshes
"""

import itertools
import math
from functools import cache, lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import covering, some
from tiny import (
    BATCH,
    DIM,
    HIDDEN,
    SEQ,
    VOCAB,
    Lean,
    Staged,
    assert_same_arrays,
    batches,
    named,
    on_one_device,
    optimizer,
    scanned,
    stack,
    token_loss,
    trace,
    train,
)

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.parallel.compose import as_blueprint
from jaxpar.pipeline.tables.csv import to_csv
from jaxpar.pipeline.tables.library import LIBRARY, schedule

# Staged names what flows between layers only; whichever test compiles such a layout first hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:sequence=True, but Staged names no activation dim")

KEEP = ("inputs", "residuals")
MESHES = {
    "pipe 2": {"pipe": 2},
    "pipe 4": {"pipe": 4},
    "pipe 8": {"pipe": 8},
    "pipe 2 x fsdp 2 x tensor 2, zero 1": {"pipe": 2, "fsdp": 2, "tensor": 2, "zero": 1},
    "pipe 2 x fsdp 2 x tensor 2, zero 3": {"pipe": 2, "fsdp": 2, "tensor": 2, "zero": 3},
    "pipe 2 x data 2 x fsdp 2": {"pipe": 2, "data": 2, "fsdp": 2},
    "pipe 2 x fsdp 4, zero 0": {"pipe": 2, "fsdp": 4, "zero": 0},
    "pipe 2 x fsdp 4, zero 2": {"pipe": 2, "fsdp": 4, "zero": 2},
    "pipe 2 x tensor 4, sequence": {"pipe": 2, "tensor": 4, "sequence": True},
    "pipe 4 x data 2": {"pipe": 4, "data": 2},
}


def stages(mesh):
    return MESHES[mesh]["pipe"]


def pairs(name, keep, mesh):
    return {(name, keep), (name, stages(mesh)), (keep, mesh)}


CASES = list(itertools.product(LIBRARY, KEEP, MESHES))
PAIRS = covering(CASES, pairs)
EACH = [(name, KEEP[i % 2], list(MESHES)[i % len(MESHES)]) for i, name in enumerate(LIBRARY)]


def parallel(name, keep, mesh, microbatches=0):
    """Twice as many microbatches as stages, unless said otherwise: all schedules take that."""
    return jp.Parallel(**MESHES[mesh], pipeline=jp.Pipeline(schedule=name, keep=keep, microbatches=microbatches))


def devices(mesh):
    axes = {axis: size for axis, size in MESHES[mesh].items() if axis not in ("zero", "sequence")}
    return jax.devices()[: math.prod(axes.values())]


def layers_of(name, mesh):
    return 16 if stages(mesh) == 8 and 2 in LIBRARY[name].chunks else 8


@cache
def model(layers=8, tied=True, rate=0.0):
    return as_blueprint(partial(Staged, layers=layers, tied=tied, rate=rate))


@cache
def alone(layers=8, tied=True, **numerics):
    losses, state, step = on_one_device(model(layers, tied), **numerics)
    return losses, state, step.evaluate(state, next(batches(1)))


@cache
def initial(layers, tied):
    """Returns the state that every layout starts from: to make it in place each time takes longer than the steps."""
    layout = jp.compose(model(layers, tied), jp.Parallel(), jax.devices()[:1])
    return jax.device_get(jp.init_state(layout, optimizer(), seed=1))


@lru_cache(maxsize=48)  # not all: a process can't hold so many programs, see conftest.py
def run(name, keep, mesh, *, fill=0.0, microbatches=0, tied=True, **numerics):
    """Returns (losses, state, step) after five steps; what buffers hold before they are written is `fill`."""
    layers = layers_of(name, mesh)
    layout = jp.compose(model(layers, tied), parallel(name, keep, mesh, microbatches), devices(mesh))
    step = jp.train_step(layout, token_loss, optimizer(), **numerics)
    step.gradients.fill = fill
    state, losses = jax.device_put(initial(layers, tied), step.shardings), []
    for batch in batches(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state, step


def assert_equals(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert_same_arrays((got[1].params, got[1].model_state), (want[1].params, want[1].model_state))


def case_of(each, *marks):
    return pytest.param(*each, id=", ".join(each), marks=[pytest.mark.xdist_group(each[0]), *marks])


def rarely(each):
    """Returns the mark of a case: CI runs some of EACH, and rows of tests/contracts/layout_table.py."""
    return [pytest.mark.slow if each in EACH else pytest.mark.full]


def test_the_covering_cases_cover_every_pair():
    assert set().union(*(pairs(*case) for case in PAIRS)) == set().union(*(pairs(*case) for case in CASES))
    assert len(PAIRS) <= 35  # 30 are needed for schedules x stages


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("name", "keep", "mesh"),
    [case_of(each, *rarely(each)) for each in CASES],
)
def test_losses_and_parameters_equal_one_device(name, keep, mesh):
    assert_equals(run(name, keep, mesh), alone(layers_of(name, mesh)))


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keep", "mesh"), [case_of(each, *[pytest.mark.slow] * (i not in (0, 6))) for i, each in enumerate(EACH)]
)
def test_evaluation_equals_one_device(name, keep, mesh):
    _, state, step = run(name, keep, mesh)
    sums, wanted = step.evaluate(state, next(batches(1))), alone(layers_of(name, mesh))[2]
    assert sums.keys() == wanted.keys()
    assert_same_arrays(sums, wanted)


# a split backward, one in a branch, one in phases, and chunks
POLLUTED = {"zb_h1": []} | {name: [pytest.mark.slow] for name in ("1f1b", "1f1b_phased")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "keep", "mesh"),
    [case_of(each, *POLLUTED.get(each[0], [pytest.mark.full])) for each in EACH],
)
def test_what_buffers_hold_before_they_are_written_leaves_no_trace(name, keep, mesh):
    """Bit for bit: masked work on what was never written is thrown away, `nan` or not."""
    losses, state, _ = run(name, keep, mesh)
    polluted, other, _ = run(name, keep, mesh, fill=float("nan"))
    assert (polluted == losses).all()
    same = jax.tree.map(lambda a, b: (a == b).all(), jax.device_get(other.params), jax.device_get(state.params))
    assert all(jax.tree.leaves(same))


FEW_AND_MANY = list(itertools.product(("gpipe", "1f1b", "1f1b_phased", "looped_bfs", "zb_h1"), (1, 2, 16), KEEP))


# in CI each schedule with each number, of which every second keeps residuals
@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "microbatches", "keep"),
    some(FEW_AND_MANY, [], [("1f1b", 16, "residuals"), ("1f1b_phased", 1, "inputs"), ("zb_h1", 2, "residuals")]),
)
def test_few_and_many_microbatches_equal_one_device(name, microbatches, keep):
    assert_equals(run(name, keep, "pipe 4", microbatches=microbatches), alone())


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "keep", "remat"),
    [
        # in CI each schedule with each remat, of which every second keeps residuals
        pytest.param(name, keep, remat, marks=pytest.mark.slow if (i + j) % 2 == k else pytest.mark.full)
        for i, name in enumerate(("1f1b", "zb_h1", "1f1b_phased"))
        for j, remat in enumerate(("dots", "all_dots", "full"))
        for k, keep in enumerate(KEEP)
    ],
)
def test_remat_changes_nothing(name, keep, remat):
    assert_equals(run(name, keep, "pipe 2", remat=remat), alone())


@pytest.mark.nightly
def test_untied_tables_equal_one_device():
    assert_equals(run("interleaved", "residuals", "pipe 2 x data 2 x fsdp 2", tied=False), alone(tied=False))


@pytest.mark.nightly
def test_a_table_of_the_users_own_equals_one_device(tmp_path):
    """Backwards in another order than any schedule of the library has."""
    rows = schedule("gpipe", stages=2, microbatches=4).cells
    turned = [tuple(c and c._replace(microbatch=3 - c.microbatch) if c and c.op == "B" else c for c in r) for r in rows]
    own = tmp_path / "own.csv"
    base = schedule("gpipe", stages=2, microbatches=4)
    own.write_text(to_csv(type(base)(name="own", stages=2, microbatches=4, cells=tuple(turned))))
    given = jp.Parallel(pipe=2, pipeline=jp.Pipeline(schedule=str(own)))
    assert_equals(train(model(), given, jax.devices()[:2])[:2], alone())


# --- kinds of models ------------------------------------------------------------------------------------------------


def decoder(**settings):
    shape = {"vocab": VOCAB, "seq": SEQ, "layers": 8, "dim": DIM, "heads": 4, "hidden": HIDDEN}
    return partial(jp.Decoder, jp.DecoderConfig(**shape, **settings))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, index):
        box = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        y = nn.Dense(HIDDEN, kernel_init=box, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(DIM, name="down")(nn.gelu(y)), None


class Linen(nn.Module):
    """`nn.scan` counts its layers by what it scans over, so that a stage can have fewer."""

    @nn.compact
    def __call__(self, tokens, train=True):
        layers = nn.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=0,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(name="blocks")
        x = nn.Embed(VOCAB, DIM, name="token_embed")(tokens)
        x = jp.pipelined(lambda x, index: layers(x, index)[0], x, jnp.arange(8))
        return nn.Dense(VOCAB, name="logits")(x)


class Cut(nnx.Module):
    """What the models below differ from."""

    count, make = 8, Lean

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.blocks = stack(rngs, self.count, self.make)
        self.extra(rngs)

    def extra(self, rngs):
        pass

    def layers(self, x):
        return scanned(lambda x, block: block(x), x, self.blocks)

    def __call__(self, tokens):
        return self.embed.attend(jp.pipelined(self.layers, self.embed(tokens)))


class Auxiliary(Cut):
    """A loss of the layers' own rides along with the stream, as in a mixture of experts."""

    def __call__(self, tokens):
        def layer(carry, block):
            x, aux = carry
            y = block(x)
            return y, aux + jnp.square(jax.nn.softmax(y)).sum()

        x, self.aux = jp.pipelined(
            lambda carry: scanned(layer, carry, self.blocks), (self.embed(tokens), jnp.zeros(()))
        )
        return self.embed.attend(x)


def auxiliary_loss(model, batch):
    (total, count), aux = token_loss(model, batch)["loss"], model.aux
    return {"loss": (total + 0.1 * aux, count), "aux": (aux, count)}


class Around(Cut):
    """Reads around the layers what it read before them, and a mask inside."""

    def extra(self, rngs):
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x, even = self.embed(tokens), (tokens % 2)[..., None].astype(jnp.float32)
        y = jp.pipelined(lambda x: self.layers(x) * even, self.drop(x))
        return self.embed.attend(self.drop(y) + x)


def images(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {
            "inputs": rng.random((BATCH, 8, 8)).astype(np.float32),
            "labels": rng.integers(0, 10, BATCH).astype(np.int32),
            "mask": (rng.random(BATCH) < 0.7).astype(np.float32),
        }


VIT = partial(jp.ViT, jp.ViTConfig(layers=8, dim=DIM, heads=2, hidden=HIDDEN, patch=4))
GPT2 = decoder(position="learned", norm="layer", gated=False, use_bias=True, tied=True)
EIGHT = "pipe 2 x fsdp 2 x tensor 2, zero 3"
KINDS = {  # a factory, where, by which schedule, and how it is trained
    "gpt-2": (lambda: GPT2, "pipe 2", "1f1b", {}),
    "vit": (lambda: VIT, "pipe 2", "1f1b", {"loss": jp.classification_loss, "data": images}),
    "linen": (
        lambda: jp.from_linen(Linen(), jax.ShapeDtypeStruct((2, SEQ), jnp.int32)), "pipe 2 x data 2 x fsdp 2", "zb_v",
        {"alone": {"accumulate": 4}},  # its key moves on with every microbatch
    ),
    "auxiliary loss": (lambda: Auxiliary, "pipe 4 x data 2", "zb_h2", {"loss": auxiliary_loss}),
    "auxiliary loss, tensor": (lambda: Auxiliary, EIGHT, "zb_h1", {"loss": auxiliary_loss}),
    "around": (lambda: Around, "pipe 4", "gpipe", {"alone": {"accumulate": 8}}),
    "llama": (decoder, EIGHT, "1f1b_phased", {"remat": "full"}),
    "llama, dots": (partial(decoder, kv_heads=2), "pipe 2 x data 2 x fsdp 2", "interleaved", {"remat": "dots"}),
    "llama, copied layers": (partial(decoder, scan=False), "pipe 4", "zb_h1", {}),
    "llama, dropout": (
        partial(decoder, dropout=0.2), "pipe 2 x tensor 4, sequence", "dualpipe_v", {"alone": {"accumulate": 4}}
    ),
    "vit on eight": (lambda: VIT, EIGHT, "looped_bfs", {"loss": jp.classification_loss, "data": images}),
}  # fmt: skip


def kinds():
    """Returns each kind of model with one keep or the other in turn; the other half is marked full, and what recurs."""
    for i, (kind, keep) in enumerate(itertools.product(KINDS, KEEP)):
        # on eight and in test_context, in test_stacks, beside tensor, with dropout
        again = kind in ("vit", "vit on eight", "llama, copied layers", "auxiliary loss", "llama", "llama, dots")
        mark = pytest.mark.slow if i % 2 == (i // 2) % 2 and not again else pytest.mark.full
        yield pytest.param(kind, keep, marks=[] if (kind, keep) == ("auxiliary loss, tensor", "inputs") else mark)


@pytest.mark.parametrize(("kind", "keep"), list(kinds()))
def test_every_kind_of_model_equals_one_device(kind, keep):
    make, mesh, name, settings = KINDS[kind]
    made, other = make(), settings.get("alone", {})
    given = {key: value for key, value in settings.items() if key != "alone"}
    want = on_one_device(made, **{key: value for key, value in given.items() if key != "remat"}, **other)
    got = train(made, parallel(name, keep, mesh), devices(mesh), **given)
    assert_equals(got[:2], want[:2])


# --- dropout and bfloat16 -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sums_of_gradients_are_not_gathered_over_tensor():
    """XLA of jax 0.10 gathers an array whose layout is constrained: those of attention's matrices have three dims."""
    config = jp.DecoderConfig(vocab=32, seq=16, layers=2, dim=16, heads=4, kv_heads=4, hidden=32)
    layout = jp.compose(lambda rngs: jp.Decoder(config, rngs=rngs), jp.Parallel(pipe=2, tensor=2, data=2))
    tokens = np.zeros((16, 16), np.int32)
    report = jp.inspect(jp.train_step(layout, jp.next_token_loss, optimizer()), {"inputs": tokens, "targets": tokens})
    over_tensor = [entry for entry in report.ledger if "tensor" in entry.axes]
    assert over_tensor
    assert not [entry for entry in over_tensor if entry.source.startswith("in_place_scan")], over_tensor


@pytest.mark.nightly
def test_dropout_equals_one_device_that_accumulates():
    """Layer by layer and microbatch by microbatch the same keys, on any number of stages."""
    made = model(rate=0.2)
    want = on_one_device(made, accumulate=4)
    got = train(made, jp.Parallel(pipe=2, tensor=2, pipeline=jp.Pipeline(schedule="interleaved")), jax.devices()[:4])
    assert_equals(got[:2], want[:2])


@pytest.mark.nightly
def test_replicas_of_the_batch_drop_different_entries():
    """Both replicas get the same rows; what differs between them is the masks, in training only."""
    half = {key: value[:8] for key, value in next(batches(1)).items()}
    batch = {key: np.concatenate([value, value]) for key, value in half.items()}
    batch["sign"] = np.repeat(np.float32([1, -1]), 8)

    def loss(model, batch):
        logits = model(batch["inputs"])
        apart = jnp.sum(batch["sign"][:, None, None] * jnp.square(logits))
        return {"loss": (jnp.sum(jnp.square(logits)), jnp.float32(1)), "apart": (apart, jnp.float32(1))}

    given = jp.Parallel(pipe=2, data=2, pipeline=jp.Pipeline(schedule="1f1b"))
    layout, chain = jp.compose(model(rate=0.2), given, jax.devices()[:4]), optimizer()
    step, state = jp.train_step(layout, loss, chain), jp.init_state(layout, chain)
    apart, _ = step.evaluate(state, batch)["apart"]
    _, metrics = step(state, batch)
    assert abs(float(apart)) < 1e-3 < 1 < abs(float(metrics["apart"]))


class DroppingBlock(nn.Module):
    @nn.compact
    def __call__(self, x, index):
        box = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        ones = jnp.ones_like(x) * self.param("scale", box, (DIM,))
        return x + nn.Dropout(0.5, deterministic=False)(ones), None


class Dropping(nn.Module):
    """Each entry of what it returns counts the layers that did not drop it, twice."""

    @nn.compact
    def __call__(self, tokens):
        layers = nn.scan(
            DroppingBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=0,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(name="blocks")
        start = 0.0 * nn.Embed(VOCAB, DIM, name="token_embed")(tokens)
        return jp.pipelined(lambda x, index: layers(x, index)[0], start, jnp.arange(8))


@pytest.mark.nightly
def test_stages_of_a_linen_model_drop_different_entries():
    """Were the masks of four stages the same, every count would be a multiple of four."""

    def loss(model, batch):
        counts = model(batch["inputs"]) / 2
        one = jnp.float32(1)
        return {"loss": (jnp.sum(counts), one), "uneven": (jnp.sum(jnp.round(counts) % 4 != 0), one)}

    layout = jp.compose(
        jp.from_linen(Dropping(), jax.ShapeDtypeStruct((2, SEQ), jnp.int32)), jp.Parallel(pipe=4), jax.devices()[:4]
    )
    step = jp.train_step(layout, loss, optimizer())
    _, metrics = step(jp.init_state(layout, optimizer()), next(batches(1)))
    uneven = float(metrics["uneven"]) * layout.microbatches  # each microbatch counts one
    assert uneven > BATCH * SEQ * DIM / 2


@pytest.mark.nightly
def test_bf16_multiplies_in_bf16_and_stays_close_to_one_device():
    want, _, _ = alone(tied=False, precision="bf16")
    losses, state, step = run("1f1b", "residuals", EIGHT, tied=False, precision="bf16")
    assert step.compiler.matmuls.share == 1
    np.testing.assert_allclose(losses, want, rtol=5e-3)  # eight bits of mantissa, summed in another order
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}


# --- what is refused ------------------------------------------------------------------------------------------------


class Wider(Cut):
    def __call__(self, tokens):
        x = jp.pipelined(lambda x: jnp.tile(self.layers(x), 2), self.embed(tokens))
        return self.embed.attend(x[..., :DIM])


class Halved(Cut):
    def layers(self, x):
        return super().layers(x).astype(jnp.bfloat16)


class Uncut(Cut):
    def __call__(self, tokens):
        return self.embed.attend(self.layers(self.embed(tokens)))


class Averaged(Cut):
    def extra(self, rngs):
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.norm(jp.pipelined(self.layers, self.embed(tokens))))


class NormBlock(Lean):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.norm(x))


class AveragedInside(Cut):
    make = NormBlock


class Outside(Cut):
    def extra(self, rngs):
        self.gain = nnx.Param(jnp.ones(DIM))

    def layers(self, x):
        return scanned(lambda x, block: block(x) * self.gain[...], x, self.blocks)


class Peeking(Cut):
    def __call__(self, tokens):
        return super().__call__(tokens) * self.blocks.up.kernel[...].mean()


class Captured(Cut):
    """The layers read a value that was computed from a shared parameter before them."""

    def extra(self, rngs):
        self.gain = nnx.Param(jnp.full(DIM, 1.1))

    def __call__(self, tokens):
        gain = jnp.square(self.gain[...])
        return self.embed.attend(jp.pipelined(lambda x: self.layers(x) * gain, self.embed(tokens)))


class PerLayer(Cut):
    """What each layer has of its own is a parameter, so that its gradient would get lost."""

    def extra(self, rngs):
        self.gains = nnx.Param(jnp.ones((8, DIM)))

    def __call__(self, tokens):
        def layers(x, gains):
            return scanned(lambda x, block, gain: block(x) * gain, x, self.blocks, gains)

        return self.embed.attend(jp.pipelined(layers, self.embed(tokens), self.gains[...]))


class Twice(Cut):
    def __call__(self, tokens):
        return self.embed.attend(jp.pipelined(self.layers, jp.pipelined(self.layers, self.embed(tokens))))


class Whole(Cut):
    """Whole numbers flow through the layers."""

    def __call__(self, tokens):
        x, _ = jp.pipelined(lambda x: (self.layers(x[0]), x[1]), (self.embed(tokens), tokens))
        return self.embed.attend(x)


class Structure(Cut):
    def layers(self, x):
        return {"x": super().layers(x)}

    def __call__(self, tokens):
        return self.embed.attend(jp.pipelined(self.layers, self.embed(tokens))["x"])


class Nine(Cut):
    count = 9


class Twelve(Cut):
    count = 12


def tries(made, **settings):
    """Traces a step on four stages of four microbatches, or what the settings say."""
    pipeline = {"microbatches": 4, **settings.pop("pipeline", {})}
    given = jp.Parallel(pipe=4, pipeline=jp.Pipeline(**pipeline))
    return lambda: trace(made, given, jax.devices()[:4], **settings)


REFUSED = {  # what is tried; words of what was got, of the rule and of the fix
    "another shape": (tries(Wider), "[4, 8, 16] and return float32[4, 8, 32]", "structure, shapes and dtypes",
                      "before or after pipelined"),
    "another dtype": (tries(Halved), "and return bfloat16[4, 8, 16]", "structure, shapes and dtypes",
                      "before or after pipelined"),
    "no stack": (tries(lambda rngs: nnx.Linear(3, 4, rngs=rngs)), "has no stack of layers", "stacked along a dim 0",
                 "pipe=1"),
    "BatchNorm": (tries(Averaged), "the averages of BatchNorm", "microbatches overlap", "LayerNorm or GroupNorm"),
    "shared inside": (tries(Outside), "reads gain inside of its layers", "a stage has nothing else", "through x"),
    "layers outside": (tries(Peeking), "reads blocks/up/kernel outside", "a stage has nothing else", "through x"),
    "layers by chunks": (tries(Twelve, pipeline={"schedule": "interleaved"}), "12 layers in 8 parts",
                         "as many layers as the others", "16 layers"),
    "microbatches": (tries(Cut, pipeline={"microbatches": 5}), "16 examples; microbatches=5",
                     "divides the global batch", "a global batch of 15"),
    "schedule's own": (tries(Cut, pipeline={"schedule": "zb_v"}), "microbatches=4 on stages=4", "at least 7",
                       "microbatches=7"),
    "accumulate": (tries(Cut, accumulate=2), "accumulate=2 with pipe=4", "accumulates over its microbatches",
                   "microbatches=8"),
    "a mean": (tries(Cut, loss=lambda model, batch: token_loss(model, batch)["loss"][0]), "a scalar loss",
               "a mean of means", "(sum, count)"),
    "another structure": (tries(Structure), "the layers of Structure take", "structure, shapes and dtypes",
                          "before or after pipelined"),
    "no cut": (tries(Uncut), "does not call jp.pipelined", "once, around its stack", 'or jp.Pipeline(stages="found")'),
    "two cuts": (tries(Twice), "calls jp.pipelined 2 times", "once, around its stack", "x = jp.pipelined(layers, x)"),
    "captured": (tries(Captured), "reads gain inside of its layers", "a stage has nothing else", "through x"),
    "BatchNorm inside": (tries(AveragedInside), "the averages of BatchNorm", "microbatches overlap",
                         "LayerNorm or GroupNorm"),
    "parameters per layer": (tries(PerLayer), "gives its layers gains one by one", "it gets no gradient",
                             "stack it with the other parameters"),
    "whole numbers": (tries(Whole), "take int32[4, 8]", "are floating point", "from the batch"),
    "layers by stages": (tries(Nine), "has 9 entries, pipe is 4", "an axis divides every dim", "a dim of 12"),
    "pipe=1": (lambda: jp.compose(Cut, jp.Parallel(pipeline=jp.Pipeline(microbatches=4)), 1), "with pipe=1",
               "how the axis `pipe` is run", "pipe=2"),
}  # fmt: skip


@pytest.mark.parametrize(
    "what", some(REFUSED, ["no stack", "layers by chunks", "microbatches", "schedule's own", "accumulate", "pipe=1"])
)
def test_what_cannot_be_cut_is_refused_once(what):
    attempt, got, rule, fix = REFUSED[what]
    problems = None
    try:
        attempt()
    except JaxparError as error:
        problems = error.problems
    assert problems is not None, "ran"
    assert len(problems) == 1, problems
    problem = problems[0]
    assert (got in problem.got, rule in problem.rule, fix in problem.fix) == (True, True, True), problem


@pytest.mark.parametrize(
    ("text", "got", "fix"),
    [
        (to_csv(schedule("1f1b", stages=2, microbatches=4)), "pipe = 4, the table in", "pipe = 2"),
        ("own,stages=4,microbatches=1,chunks=1,placement=ring\nF0,B0\n.,F0\n.,F0\n.,F0\n", "tick 1, stage 0", "later"),
        ("own,stages=4,microbatches=4\n", "line 1", "placement=ring"),
        (None, "No such file", "jaxpar schedule"),
    ],
    ids=["stages of another", "a circle", "no header", "no file"],
)
def test_a_table_that_cannot_be_run_is_refused(text, got, fix, tmp_path):
    own = tmp_path / "own.csv"
    if text is not None:
        own.write_text(text)
    given = jp.Parallel(pipe=4, pipeline=jp.Pipeline(schedule=str(own)))
    with pytest.raises(JaxparError) as caught:
        jp.compose(Cut, given, jax.devices()[:4])
    (problem,) = caught.value.problems
    assert got in problem.got
    assert fix in problem.fix
