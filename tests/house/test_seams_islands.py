"""Attention is an island: any model calls it, and the step's layout says what runs; a ring is one file of a test."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ring
from flax import linen as nn
from flax import nnx
from pairwise import some
from tiny import SEQ, VOCAB, assert_same_arrays, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.job.file import parse
from jaxpar.models.islands import unsharded_attention, use_islands
from jaxpar.parallel.techniques import all_techniques
from jaxpar.parallel.techniques.context import CONTEXT

DIM, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 4
NAMES = {
    "q": ("embed", "heads", "head_dim"),
    "k": ("embed", "kv_heads", "head_dim"),
    "out": ("heads", "head_dim", "embed"),
}
NAMES["v"] = NAMES["k"]
SHAPES = {"q": (DIM, HEADS, HEAD_DIM), "k": (DIM, KV_HEADS, HEAD_DIM), "out": (HEADS, HEAD_DIM, DIM)}
SHAPES["v"] = SHAPES["k"]
CONTEXT_2, CONTEXT_2_TENSOR_2 = {"data": 4, "context": 2}, {"data": 2, "context": 2, "tensor": 2}


def attend(x, w, attention):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in ("q", "k", "v"))
    return jnp.einsum("bshk,hkd->bsd", attention(q, k, v), w["out"])


def of_jaxpar(q, k, v):
    return jp.attention(q, k, v, causal=True)


def of_plain(q, k, v):
    return unsharded_attention(q, k, v, causal=True)


class Mine(nnx.Module):
    """A user's own model: one layer of attention, its stream named and nothing else."""

    attention = staticmethod(of_jaxpar)

    def __init__(self, rngs):
        init = nnx.initializers.normal(0.3)
        self.embed = nnx.Param(init(rngs.params(), (VOCAB, DIM)), out_sharding=("vocab", "embed"))
        self.w = nnx.Dict(
            {name: nnx.Param(init(rngs.params(), SHAPES[name]), out_sharding=names) for name, names in NAMES.items()}
        )

    def __call__(self, tokens):
        table = self.embed[...]
        x = jp.constrain(table[tokens], "batch", "seq", "embed")
        x = x + attend(x, {name: param[...] for name, param in self.w.items()}, self.attention)
        return jp.constrain(x, "batch", "seq", "embed") @ table.T


class Plain(Mine):
    attention = staticmethod(of_plain)


class Unnamed(Mine):
    def __call__(self, tokens):
        table = self.embed[...]
        return attend(table[tokens], {name: param[...] for name, param in self.w.items()}, of_jaxpar) @ table.T


class MineInLinen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal(0.3)
        boxed = {name: nn.with_logical_partitioning(init, names) for name, names in NAMES.items()}
        w = {name: self.param(name, box, SHAPES[name]) for name, box in boxed.items()}
        table = self.param("embed", nn.with_logical_partitioning(init, ("vocab", "embed")), (VOCAB, DIM))
        x = nn.with_logical_constraint(table[tokens], ("batch", "seq", "embed"))
        return (x + attend(x, w, of_jaxpar)) @ table.T


MODELS = {
    "nnx": lambda rngs: Mine(rngs),
    "linen": jp.from_linen(MineInLinen(), jax.ShapeDtypeStruct((2, SEQ), jnp.int32)),
}


@pytest.fixture
def with_ring():
    ring.calls.clear()
    with all_techniques.with_technique(replace(CONTEXT, how={**CONTEXT.how, "ring": {"attention": ring.ring}})):
        yield


def trained(model, **parallel):
    devices = None if parallel else jax.devices()[:1]
    losses, state, _ = train(model, jp.Parallel(**parallel), devices, loss=jp.next_token_loss, steps=3)
    return losses, state.params


@pytest.mark.nightly
@pytest.mark.usefixtures("with_ring")
@pytest.mark.parametrize(
    ("model", "how", "sizes"),
    some(
        [
            ("nnx", "ring", CONTEXT_2),
            ("nnx", "ring", CONTEXT_2_TENSOR_2),
            ("linen", "ring", CONTEXT_2),
            ("linen", "ring", CONTEXT_2_TENSOR_2),
            ("nnx", "gather", CONTEXT_2_TENSOR_2),
        ],
        [("nnx", "ring", CONTEXT_2_TENSOR_2)],
        [("linen", "ring", CONTEXT_2)],
    ),
    ids=lambda value: " x ".join(value) if isinstance(value, dict) else value,
)
def test_a_users_model_trains_as_on_one_device_however_attention_runs(model, how, sizes):
    expected, whole = trained(MODELS[model])
    losses, params = trained(MODELS[model], how={"context": how}, **sizes)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(params, whole)
    assert bool(ring.calls) == (how == "ring")


@pytest.mark.spread(0)
@pytest.mark.usefixtures("with_ring")
@pytest.mark.parametrize(
    "sizes",
    some(
        [CONTEXT_2_TENSOR_2, {"pipe": 2, "data": 2, "context": 2, "pipeline": jp.Pipeline(microbatches=2)}],
        [],
        [CONTEXT_2_TENSOR_2],
    ),
    ids=["context x tensor", "in a pipeline"],
)
def test_the_decoder_hands_an_implementation_its_keys_as_they_are_cut(sizes):
    """Also in a stack that is scanned, and where a pipeline has other axes in its own hands."""
    settings = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=2, dim=16, heads=4, kv_heads=2, hidden=32)
    model = lambda rngs: jp.Decoder(settings, rngs=rngs)  # noqa: E731
    expected, whole = trained(model)
    losses, params = trained(model, how={"context": "ring"}, **sizes)
    assert ring.calls
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(params, whole)


def lowered(model, **parallel):
    layout = jp.compose(model, jp.Parallel(**parallel))
    step = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1))
    ids = jax.ShapeDtypeStruct((8, SEQ), jnp.int32)
    return step.lower(step.abstract(), {"inputs": ids, "targets": ids})


@pytest.mark.parametrize("sizes", [{"data": 8}, {"fsdp": 4, "tensor": 2}], ids=["data", "fsdp x tensor"])
def test_without_context_the_program_is_that_of_the_plain_function(sizes):
    assert lowered(lambda rngs: Mine(rngs), **sizes).as_text() == lowered(lambda rngs: Plain(rngs), **sizes).as_text()


@pytest.mark.nightly
def test_gathering_is_a_constraint_and_a_ring_sends_to_the_next(with_ring):
    texts = {how: lowered(MODELS["nnx"], how={"context": how}, **CONTEXT_2).as_text() for how in ("gather", "ring")}
    assert ["collective_permute" in text for text in texts.values()] == [False, True]


def test_of_a_step_and_in_a_users_context_it_is_a_plain_function():
    q, k, v = (jax.random.normal(key, (2, 8, 4, 4)) for key in jax.random.split(jax.random.key(0), 3))
    again = jax.jit(jp.attention)
    for attention in (jp.attention, again):
        np.testing.assert_array_equal(attention(q, k, v), jax.nn.dot_product_attention(q, k, v))
    with use_islands({"attention": lambda q, k, v, *, causal: q + 1}) as called:  # also what was jitted before
        np.testing.assert_array_equal(again(q, k, v), q + 1)
    assert called == {"attention"}
    np.testing.assert_array_equal(again(q, k, v), jax.nn.dot_product_attention(q, k, v))


Q, K = (2, 8, 4, 4), (2, 8, 2, 4)


@pytest.mark.parametrize(
    ("q", "k", "v", "causal"),
    [
        (Q[:3], K, K, False),
        (Q, K, (2, 8, 4, 4), False),
        (Q, (3, 8, 2, 4), (3, 8, 2, 4), False),
        (Q, (2, 8, 3, 4), (2, 8, 3, 4), False),
        (Q, (2, 8, 2, 8), (2, 8, 2, 8), False),
        (Q, (2, 6, 2, 4), (2, 6, 2, 4), True),
    ],
    ids=["rank", "values unlike keys", "batch", "heads", "head_dim", "causal, fewer keys"],
)
def test_shapes_that_do_not_belong_together_are_refused(q, k, v, causal):
    with pytest.raises(JaxparError, match=r"jp.attention\(q float32\[2, 8.*\n.*q is \[batch, queries, heads, head_dim"):
        jp.attention(jnp.zeros(q), jnp.zeros(k), jnp.zeros(v), causal=causal)


def test_dtypes_that_differ_are_refused():
    with pytest.raises(JaxparError, match=r"k bfloat16\[2, 8, 2, 4\]"):
        jp.attention(jnp.zeros(Q), jnp.zeros(K, jnp.bfloat16), jnp.zeros(K))


@pytest.mark.usefixtures("with_ring")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": 4, "context": 2, "how": {"context": "rign"}}, r"'rign'.*\n.*context: gather, ring, .*\n.*ring"),
        ({"data": 4, "context": 2, "how": {"contex": "ring"}}, r"'contex'.*\n.*\n.*context"),
        ({"data": 8, "how": {"context": "ring"}}, "with context=1 does nothing"),
        ({"data": 8, "how": "ring"}, "how='ring'"),
    ],
)
def test_a_way_that_is_not_there_or_does_nothing_is_refused(given, said):
    with pytest.raises(JaxparError, match=said):
        jp.compose(MODELS["nnx"], jp.Parallel(**given))


@pytest.mark.usefixtures("with_ring")
def test_a_way_that_the_model_never_takes_is_refused():
    said = r"how=\{'context': 'ring'\}, but Plain never calls jp.attention.*\n.*\n.*softcap=50.* a bias .*=\"gather\""
    with pytest.raises(JaxparError, match=said):
        lowered(lambda rngs: Plain(rngs), how={"context": "ring"}, **CONTEXT_2)


def test_to_call_attention_is_not_to_name_the_stream():
    with pytest.raises(JaxparError, match="context=2, but Unnamed names no activation dim seq"):
        lowered(lambda rngs: Unnamed(rngs), **CONTEXT_2)


@pytest.mark.usefixtures("with_ring")
def test_a_job_declares_it_and_the_layout_says_so():
    job = parse.loads('[parallel]\ncontext = 8\n[parallel.how]\ncontext = "ring"\n[mesh]\nsimulate = 8\n')
    assert "context by ring" in jp.compose(MODELS["nnx"], job.parallel).summary()
