"""A model computes in bf16 as its author wrote it: what stays in float32 is what somebody told to, and is listed."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import unannotated as bare
from flax import linen as nn
from flax import nnx, struct
from pairwise import some
from published import EXAMPLES

import jaxpar as jp
from jaxpar.job.build import assemble
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.mesh.target import missing_plugin
from jaxpar.models.settings.computing import Precision
from jaxpar.step.init_state import init_state

DIM, VOCAB, ROWS, SEQ = 16, 32, 8, 8


class Defaulted(nn.Module):
    """As many Linen modules are written: float32 is the default of the class, and handed on."""

    dtype: Any = jnp.float32
    told: Any = None

    def setup(self):
        self.first = nn.Dense(DIM, dtype=self.dtype)

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dtype=self.told or self.dtype)(nn.tanh(self.first(x)))


class Filled(nn.Module):
    """A table in a field that is no argument: setup() fills it."""

    dtype: Any = jnp.float32
    table: jax.Array = dataclasses.field(init=False)

    def setup(self):
        self.table = self.param("table", nn.initializers.lecun_normal(), (DIM, 8))

    def __call__(self, x):
        return x.astype(self.dtype) @ self.table.astype(self.dtype)


@struct.dataclass
class Config:
    """As Flax's language models have it."""

    dim: int = DIM
    dtype: Any = jnp.float32


class Configured(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dtype=self.config.dtype)(nn.tanh(nn.Dense(self.config.dim, dtype=self.config.dtype)(x)))


class Handed(nnx.Module):
    def __init__(self, dim=DIM, *, dtype=jnp.float32, told=None, rngs):
        self.dtype = dtype
        self.first = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(dim, 8, dtype=told or dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)).astype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Settings:
    dim: int = DIM
    dtype: Any = jnp.float32


class Set(nnx.Module):
    def __init__(self, settings, rngs):
        self.settings = settings
        self.first = nnx.Linear(settings.dim, settings.dim, dtype=settings.dtype, rngs=rngs)
        self.last = nnx.Linear(settings.dim, 8, dtype=settings.dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)).astype(self.settings.dtype))


class TiedLinen(nn.Module):
    """A normalization in float32 whose result nobody casts, and a head that reads the embedding's table."""

    how: str

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, DIM)
        h = rms(nn.Dense(DIM)(table(tokens)))
        match self.how:
            case "attend":
                return table.attend(h)
            case "@":
                return h @ table.embedding.T
            case _:
                return jnp.einsum("bsd,vd->bsv", h, table.embedding)


class TiedNNX(nnx.Module):
    def __init__(self, how, rngs):
        self.how = how
        self.table = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, tokens):
        h = rms(self.dense(self.table(tokens)))
        match self.how:
            case "attend":
                return self.table.attend(h)
            case "@":
                return h @ self.table.embedding.T
            case _:
                return jnp.einsum("bsd,vd->bsv", h, self.table.embedding[...])


def rms(x):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class Router(nn.Module):
    """Scores of experts, which its author wants in float32."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dtype=jnp.float32, param_dtype=jnp.float32, name="scores")(x.astype(jnp.float32))


class Routed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x) * Router()(x)


INPUT = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
TOKENS = np.zeros((1, SEQ), np.int32)
MODELS = {
    "a field of Linen's": jp.from_linen(Defaulted(), INPUT),
    "a field that setup fills": jp.from_linen(Filled(), INPUT),
    "a config of Linen's": jp.from_linen(Configured(Config()), INPUT),
    "an argument of NNX's": lambda rngs: Handed(rngs=rngs),
    "a config of NNX's": lambda rngs: Set(Settings(), rngs),
}


def squares(model, batch):
    errors = jnp.square(model(batch["inputs"]).mean(axis=-1))
    return jnp.sum(errors), jnp.float32(errors.size)


def step_of(model, loss=squares, devices=None, precision: Any = "bf16", **sizes):
    layout = jp.compose(model, jp.Parallel(**sizes), devices or jax.devices()[:1])
    return jp.train_step(layout, loss, optax.sgd(0.1), precision=precision)


def lowered(model, batch=None, **given):
    step = step_of(model, **given)
    step.lower(step.abstract(), batch or {"inputs": INPUT})
    return step.compiler.matmuls


def tokens(length=SEQ):
    ids = jax.ShapeDtypeStruct((ROWS, length), jnp.int32)
    return {"tokens": ids, "targets": ids}


@pytest.mark.parametrize("name", MODELS)
def test_a_default_is_open(name):
    assert lowered(MODELS[name]).share == 1


@pytest.mark.parametrize("how", ["attend", "@", "einsum"])
@pytest.mark.parametrize("flax", ["linen", "nnx"])
def test_a_tied_head_is_computed_in_bf16_whatever_it_is_given(flax, how):
    model = jp.from_linen(TiedLinen(how), TOKENS) if flax == "linen" else lambda rngs: TiedNNX(how, rngs)
    assert lowered(model, tokens(), loss=bare.token_loss).share == 1


@pytest.mark.parametrize(
    "model",
    [jp.from_linen(Defaulted(told=jnp.float16), INPUT), lambda rngs: Handed(told=jnp.float16, rngs=rngs)],
    ids=["linen", "nnx"],
)
def test_the_word_of_an_author_is_kept(model):
    with pytest.raises(jp.JaxparError, match=r"matrix products are bf16[\s\S]*f16\["):
        lowered(model)


@pytest.mark.parametrize("allow", ["Router.__call__", "Rout*.__call__", "test_compute_dtype.py:*"])
def test_what_stays_in_float32_is_listed_and_allowed_by_the_names_in_the_list(allow):
    model = jp.from_linen(Routed(), INPUT)
    with pytest.raises(jp.JaxparError, match=r"Router.__call__ \(test_compute_dtype.py:\d+\), f32\[.*, 50.0%"):
        lowered(model)
    found = lowered(model, precision={"compute": "bf16", "allow": [allow]})
    assert (found.share, [each.function for each in found.high_precision]) == (0.5, ["Router.__call__"])
    assert "Router.__call__ (test_compute_dtype.py" in found.notes[0]


@pytest.mark.nightly
def test_gradients_of_scores_that_are_float32_are_listed_and_refused_nowhere():
    """JAX's attention on a processor: of long sequences they are more than 5 % of the FLOP, and no author's."""
    settings = jp.DecoderConfig(vocab=VOCAB, seq=128, layers=1, dim=32, heads=2, hidden=32)
    batch = {name: jax.ShapeDtypeStruct((2, 128), jnp.int32) for name in ("inputs", "targets")}
    found = lowered(partial(jp.Decoder, settings), batch, loss=jp.next_token_loss)
    (each,) = found.high_precision
    assert each.share == each.mixed > 0.05


def test_a_pattern_that_allows_nothing_is_refused():
    with pytest.raises(jp.JaxparError, match=r"allow='Rooter\.\*'[\s\S]*one of: Router.__call__"):
        lowered(jp.from_linen(Routed(), INPUT), precision=Precision("bf16", allow=("Router.*", "Rooter.*")))


def test_a_job_names_what_may_stay_in_float32():
    job = loads("[train]\nprecision = {compute = 'bf16', allow = ['Router.*']}")
    assert job.train.precision == Precision("bf16", allow=("Router.*",))
    assert loads(dumps(job)) == job
    assert loads("[train]\nprecision = 'bf16'").train.precision == Precision("bf16")


@pytest.mark.parametrize(
    "model", [jp.from_linen(Defaulted(), INPUT), lambda rngs: Handed(rngs=rngs)], ids=["linen", "nnx"]
)
def test_a_loss_gets_in_float32_what_a_model_returns(model):
    def mean(model, batch):  # as a user of optax writes it
        logits = model(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def cast(model, batch):
        return mean(lambda x: model(x).astype(jnp.float32), batch)

    batch = {"inputs": INPUT, "labels": jax.ShapeDtypeStruct((ROWS,), jnp.int32)}
    steps = [step_of(model, loss) for loss in (mean, cast)]
    texts = [step.lower(step.abstract(), batch).as_text() for step in steps]
    assert texts[0] == texts[1]
    assert steps[0].compiler.matmuls.share == 1


def example(name):
    found = EXAMPLES[name]
    return found.model, found.loss, found.numbers()


# of what each author wrote: the model, its loss, a batch, and the functions whose matmuls stay in float32
AUTHORS = {
    # angles of positions are float32, and so are queries and keys that they turn
    "qwen3": lambda: (partial(bare.Qwen3, 64, 32, 64, 4, 2, 8), bare.token_loss, tokens(), {"grouped"}),
    "pali": lambda: (jp.from_linen(bare.PaLI(64, 32, 64, 4, 1, 8), TOKENS), bare.token_loss, tokens(), {"grouped"}),
    "gpt2": lambda: (jp.from_linen(bare.GPT2(64, 32, 4, 32), TOKENS), bare.token_loss, tokens(), set()),
    "whisper": lambda: (
        jp.from_linen(bare.Whisper(64, 32, 4, SEQ, SEQ), np.zeros((1, 2 * SEQ, 4), np.float32), TOKENS),
        bare.sound_loss,
        tokens() | {"sound": jax.ShapeDtypeStruct((ROWS, 2 * SEQ, 4), jnp.float32)},
        set(),
    ),
    "seq2seq": lambda: (*example("seq2seq"), set()),
    "resnet": lambda: (*example("resnet"), set()),
    # the power iteration of its SpectralNorm
    "normed": lambda: (*example("normed"), {"Normed.__call__"}),
    "bridged": lambda: (*example("bridged"), set()),
    "back": lambda: (*example("back"), set()),
}


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("name", some(AUTHORS, [], ["qwen3", "gpt2", "normed", "bridged", "back"]))
def test_a_model_as_its_author_wrote_it_is_computed_in_bf16(name):
    model, loss, batch, kept = AUTHORS[name]()
    found = lowered(model, batch, loss=loss)
    assert found.share >= 0.95
    assert {each.function for each in found.high_precision} == kept


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_gpus_compute_in_bf16_all_but_what_is_listed():
    model = partial(bare.Gemma, 64, 32, 64, 4, 1, 8)
    report = jp.inspect(step_of(model, bare.token_loss, jp.target_devices("h100:1x8"), data=8), tokens())
    assert report.flop.by_dtype["bf16"] >= 0.95 * report.flop.total
    assert any("not bf16" in note and "grouped (unannotated.py:" in note for note in report.notes)


@pytest.mark.spread(0)
@pytest.mark.filterwarnings("ignore:.*FLOP of matmuls")  # muon's products are whole on every device
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param('optimizer.name = "muon"', marks=pytest.mark.slow),
        pytest.param('parallel.exchange = { name = "powersgd", smallest = 256, rank = 4 }', marks=pytest.mark.full),
    ],
    ids=["optimizer", "exchange"],
)
def test_products_of_an_update_are_none_of_the_models(settings):
    """They are in float32, and of a small batch most of a step's: muon's were 78 %, of which a step was refused."""
    job = loads(f"""
    mesh.simulate = 2
    parallel.data = 2
    model = {{ layers = 2, dim = 64, heads = 4, vocab = 256, seq = 16 }}
    data.seq = 16
    train = {{ global_batch = 4, steps = 3, precision = "bf16" }}
    {settings}
    """)
    step = assemble(job, jax.devices()[:2])
    tokens = np.zeros((4, 16), np.int32)
    step(init_state(step.layout, step.optimizer), {"inputs": tokens, "targets": tokens})
    assert step.compiler.matmuls.share > 0.95
    assert len(step.compiler.matmuls.high_precision) <= 2
