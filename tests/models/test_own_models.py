"""A user's own Flax model starts from a Hugging Face folder, trains on any mesh, and is written back.

tests/models/huggingface  tiny models and the logits that transformers computed of them (make.py says how)
"""

import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.models.huggingface.param_mapping import TABLES
from jaxpar.models.huggingface.param_rules import expand
from jaxpar.models.huggingface.safetensors import TensorSource, entries, write
from jaxpar.models.huggingface.weights import load

SAVED = Path(__file__).parents[1] / "models" / "huggingface"
MODELS = sorted(path.name for path in SAVED.iterdir() if path.is_dir())
README = Path(__file__).parents[2] / "jaxpar" / "models" / "huggingface" / "README.md"
TOKENS = (np.arange(24).reshape(2, 12) * 7 % 40).astype(np.int32)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Attention(nnx.Module):
    def __init__(self, rngs):
        linear = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.q, self.k, self.v = linear(16, (4, 4)), linear(16, (2, 4)), linear(16, (2, 4))
        self.o = linear((4, 4), 16, axis=(-2, -1))

    def __call__(self, x):
        q, k, v = rotate(self.q(x)), rotate(self.k(x)), self.v(x)
        scores = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, axis=2)) / 2
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e30)
        return self.o(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), jnp.repeat(v, 2, axis=2)))


def rotate(x):
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(2) / 2)[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Block(nnx.Module):
    def __init__(self, rngs):
        linear, norm = partial(nnx.Linear, use_bias=False, rngs=rngs), partial(nnx.RMSNorm, 16, rngs=rngs)
        self.norm1, self.attn, self.norm2 = norm(), Attention(rngs), norm()
        self.gate, self.up, self.down = linear(16, 24), linear(16, 24), linear(24, 16)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """A Llama as a user writes it, with a list of layers."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(40, 16, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 40, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


RULES = eval(re.search(r"rules = (\{.*?\n\})", README.read_text(), re.DOTALL)[1])  # the example of the README
NAMES = {
    "attn/[qkv]/kernel": ("embed", "heads", "head_dim"), "attn/o/kernel": ("heads", "head_dim", "embed"),
    "(gate|up)/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed"), "head/kernel": ("embed", "vocab"),
    "embed/embedding": ("vocab", "embed"),
}  # fmt: skip


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return losses.sum(), losses.size


def refused(call, *words, problems=1):
    with pytest.raises(JaxparError) as caught:
        call()
    text = str(caught.value)
    assert not [word for word in words if word not in text], text
    assert len(caught.value.problems) == problems, text


def with_rules(changes):
    return {path: rule for path, rule in (RULES | changes).items() if rule != "out"}


@pytest.mark.nightly
def test_a_llama_of_a_user_starts_from_a_folder_trains_and_is_written_back(tmp_path):
    layout = jp.compose(Llama, jp.Parallel(data=2, fsdp=2, tensor=2, paths=NAMES))
    weights = jp.from_huggingface(SAVED / "llama", Llama, RULES)
    state = jp.init_state(layout, OPTIMIZER, params=weights)
    kernel = state.params["layers"]["0"]["attn"]["q"]["kernel"]
    assert max(shard.data.size for shard in kernel.addressable_shards) == kernel.size // 4
    want = np.load(SAVED / "llama" / "logits.npy", allow_pickle=False)
    logits = jp.model(layout, state, device=jax.devices()[0])(jnp.asarray(TOKENS))
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)

    files = jp.to_huggingface(tmp_path / "same", layout, state, RULES, origin=SAVED / "llama")
    assert {path.name for path in files} == {"config.json", "model.safetensors"}
    before, after = entries(SAVED / "llama" / "model.safetensors"), entries(tmp_path / "same" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].view().tobytes() == after[name].view().tobytes() for name in before)
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == json.loads(
        (SAVED / "llama" / "config.json").read_text()
    )

    x = np.random.default_rng(0).integers(0, 40, (8, 12)).astype(np.int32)
    batch = {"x": x, "y": np.roll(x, -1, axis=1)}
    alone = jp.model(layout, state, device=jax.devices()[0])
    graph, params = nnx.split(alone)
    step, momentum = jp.train_step(layout, loss, OPTIMIZER), OPTIMIZER.init(params)
    for _ in range(2):
        state, metrics = step(state, batch)

        def mean(params):
            return loss(nnx.merge(graph, params), batch)[0] / x.size

        value, gradients = jax.jit(jax.value_and_grad(mean))(params)
        updates, momentum = OPTIMIZER.update(gradients, momentum, params)
        params = optax.apply_updates(params, updates)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    jp.to_huggingface(tmp_path / "tuned", layout, state, RULES, origin=SAVED / "llama")
    tuned = load(tmp_path / "tuned")  # as transformers reads it
    decoder = jp.compose(partial(jp.Decoder, tuned.settings), jp.Parallel(data=8))
    theirs = jp.model(decoder, jp.init_state(decoder, OPTIMIZER, params=tuned.params), device=jax.devices()[0])
    np.testing.assert_allclose(
        theirs(jnp.asarray(TOKENS)), nnx.merge(graph, params)(jnp.asarray(TOKENS)), rtol=2e-5, atol=2e-5
    )


def own_rules(kind, leaves):
    """Writes the table of a family as rules of a user."""
    rules = {}
    for line in filter(str.strip, TABLES[kind].splitlines()):
        path, dims, name, flat = (cell.split() for cell in re.split(r" {2,}", line.strip()))
        if path[0] in leaves:
            theirs = " ".join(f"({' '.join(re.findall(r'.[+]?', word))})" for word in flat)
            ours = [dim for dim in dims if name[0].count("{}") < 2 or dim != "e"]
            rules[path[0]] = (name[0], f"{theirs} -> {' '.join(ours)}")
    return rules


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(MODELS, ["gpt_neox", "mixtral"]))
def test_rules_read_and_write_what_the_tables_of_the_families_do(name, tmp_path):
    saved = load(SAVED / name)
    model = jp.from_nnx(partial(jp.Decoder, saved.settings), jnp.zeros((1, 8), jnp.int32))
    tensors = entries(SAVED / name / "model.safetensors")
    rules = own_rules(saved.kind, saved.params)
    weights = jp.from_huggingface(SAVED / name, model, rules)
    assert weights.keys() == saved.params.keys()
    for path, tensor in weights.items():
        assert tensor[...].tobytes() == saved.params[path][...].tobytes(), path
    layout = jp.compose(model, jp.Parallel(data=8))
    state = jp.init_state(layout, OPTIMIZER, params=weights)
    jp.to_huggingface(tmp_path, layout, state, rules, origin=SAVED / name)
    after = entries(tmp_path / "model.safetensors")
    assert tensors.keys() == after.keys()
    for key, entry in tensors.items():
        assert entry.view().tobytes() == after[key].view().tobytes(), key


class Classifier(nn.Module):
    """A Linen model with a stack of layers and a new head."""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(2, name="classifier")(stack(name="layers")(x, None)[0])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.Dense(4)(x)), None


LINEN = {
    "layers/Dense_0/kernel": ("encoder.{}.weight", "b a -> a b"), "layers/Dense_0/bias": "encoder.{}.bias",
    "classifier/*": None,
}  # fmt: skip


def save(folder, tensors, dtype=np.float32):
    folder.mkdir()
    sources = [
        TensorSource(name, np.dtype(value.dtype if value.dtype.kind == "i" else dtype), value.shape, lambda v=value: v)
        for name, value in tensors.items()
    ]
    write(folder, sources, max_file_bytes=10**9)
    (folder / "config.json").write_text('{"model_type": "bert", "torch_dtype": "bfloat16"}')
    return folder


def encoder(seed=0):
    rng = np.random.default_rng(seed)
    tensors = {f"encoder.{i}.weight": rng.normal(size=(4, 4)) for i in range(3)}
    return tensors | {f"encoder.{i}.bias": rng.normal(size=(4,)) for i in range(3)}


@pytest.mark.nightly
def test_a_linen_model_takes_the_body_in_16_bits_and_starts_with_a_new_head(tmp_path):
    tensors = encoder() | {"pooler.weight": np.zeros((4, 4)), "position_ids": np.arange(4)}
    folder = save(tmp_path / "in", tensors, jnp.bfloat16)
    model = jp.from_linen(Classifier(), jnp.zeros((1, 4)))
    layout = jp.compose(model, jp.Parallel(data=2, fsdp=4))
    weights = jp.from_huggingface(folder, layout, LINEN, skip=["pooler.*", "position_ids"])
    assert weights["classifier/kernel"] is None
    state, new = jp.init_state(layout, OPTIMIZER, params=weights, seed=3), jp.init_state(layout, OPTIMIZER, seed=3)
    np.testing.assert_array_equal(state.params["classifier"]["kernel"], new.params["classifier"]["kernel"])
    for i in range(3):
        kernel = np.asarray(state.params["layers"]["Dense_0"]["kernel"][i])
        np.testing.assert_array_equal(kernel, tensors[f"encoder.{i}.weight"].T.astype(jnp.bfloat16).astype(np.float32))
    jp.to_huggingface(tmp_path / "out", layout, state, LINEN, origin=folder, dtype="bfloat16", max_file_bytes=64)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = jp.from_huggingface(tmp_path / "out", model, LINEN)
    for path in ("layers/Dense_0/kernel", "layers/Dense_0/bias"):
        assert again[path][...].tobytes() == weights[path][...].tobytes()


@pytest.mark.slow
def test_initial_parameters_may_be_plain_arrays_of_flax(tmp_path):
    model, plain = Classifier(), Classifier().init(jax.random.key(5), jnp.zeros((1, 4)))["params"]
    layout = jp.compose(jp.from_linen(model, jnp.zeros((1, 4))), jp.Parallel(data=2, fsdp=4))
    state = jp.init_state(layout, OPTIMIZER, params=plain)
    jax.tree.map(np.testing.assert_array_equal, state.params, plain)
    refused(
        lambda: jp.init_state(layout, OPTIMIZER, params={"classifier": {"bias": np.zeros(3)}, "hed": None}),
        "missing: classifier/kernel, layers/Dense_0/bias", "not of the model: hed", "classifier/bias [3], not [2]",
        problems=3,
    )  # fmt: skip
    refused(lambda: jp.init_state(layout, OPTIMIZER, params=[1]), "params=[1]")
    refused(lambda: jp.init_state(layout, OPTIMIZER, params={"classifier": 3.0}), "params[classifier] = 3.0")


def test_adapters_begin_anew_beside_the_weights_of_a_folder(tmp_path):
    model = jp.add_lora(Llama, rank=2, paths=["layers/*/up/kernel"])
    layout = jp.compose(model, jp.Parallel(data=8))
    state = jp.init_state(layout, OPTIMIZER, params=jp.from_huggingface(SAVED / "llama", layout, RULES))
    jp.to_huggingface(tmp_path / "out", layout, state, RULES, origin=SAVED / "llama")
    before, after = load(SAVED / "llama").params, load(tmp_path / "out").params
    assert all(before[path][...].tobytes() == after[path][...].tobytes() for path in before)


# changes of the rules, and the words of each problem
MISTAKES = {
    "no rule": ({"norm/scale": "out"}, ["parameters without a rule: norm/scale"]),
    "typing error": ({"norm/scale": "out", "norm/scales": "model.norm.weight"},
                     ["rule 'norm/scales' matches no parameter", "did you mean 'norm/scale'", "without a rule"]),
    "two rules": ({"layers/1/norm1/scale": "model.norm.weight"}, ["layers/1/norm1/scale has two rules"]),
    "no dims": ({"head/kernel": "lm_head.weight"}, ["head/kernel [16, 40] is mapped to lm_head.weight without its"]),
    "not transposed": ({"head/kernel": ("lm_head.weight", "a b -> a b")}, ["lm_head.weight [40, 16], not [16, 40]"]),
    "rank": ({"head/kernel": ("lm_head.weight", "b -> b")}, ["1 dims on the right, the parameter has [16, 40]"]),
    "words": ({"head/kernel": ("lm_head.weight", "a b -> a c")}, ["different words"]),
    "form": ({"head/kernel": ("lm_head.weight", "(a b")}, ["not of the form tensor -> parameter"]),
    "no name": ({"head/kernel": 3}, ["the rule of head/kernel is 3"]),
    "braces": ({"head/kernel": ("lm_{head}.weight", "a b -> b a")}, ["the rule of head/kernel is"]),
    "numbers": ({"layers/{}/norm1/scale": "model.norm.weight"}, ["model.norm.weight, which has 0 {}"]),
    "tensors": ({"norm/scale": "model.norm.scale", "head/kernel": None},
                ["not in the folder: model.norm.scale", "no rule reads: lm_head.weight, model.norm.weight"]),
    "shared": ({"layers/{}/norm1/scale": ("model.layers.{}.post_attention_layernorm.weight", "a -> a")},
               ["is the tensor of layers/0/norm1/scale, layers/0/norm2/scale"]),
    "shared dims": ({"layers/{}/up/kernel": ("model.layers.{}.mlp.up_proj.weight", "b+ a -> a b"),
                     "layers/{}/down/kernel": ("model.layers.{}.mlp.up_proj.weight", "b+ a -> a b")}, ["dims differ"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_rules_are_reported_at_once(name):
    changes, words = MISTAKES[name]
    with pytest.raises(JaxparError) as caught:
        jp.from_huggingface(SAVED / "llama", Llama, with_rules(changes))
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_the_layers_of_a_larger_model_are_no_silent_rest(tmp_path):
    folder = save(tmp_path / "in", encoder() | {"encoder.3.bias": np.zeros(4), "ids": np.arange(3)})
    model = jp.from_linen(Classifier(), jnp.zeros((1, 4)))
    refused(lambda: jp.from_huggingface(folder, model, LINEN), "no rule reads: encoder.3.bias, ids", "skip=[")
    refused(
        lambda: jp.from_huggingface(folder, model, LINEN, skip=["ids", "*.3.bias", "pooler"]),
        "'pooler' matches no tensor",
    )
    rules = LINEN | {"classifier/*": None, "layers/Dense_0/bias": "encoder.{}.beta"}
    refused(lambda: jp.from_huggingface(folder, model, rules), "encoder.0.beta", "encoder.0.bias", problems=2)
    refused(lambda: jp.from_huggingface(folder, model, [1]), "rules=[1]")


def test_what_cannot_be_written_is_refused(tmp_path):
    model = jp.from_linen(Classifier(), jnp.zeros((1, 4)))
    layout = jp.compose(model, jp.Parallel(data=8))
    state = jp.init_state(layout, OPTIMIZER)
    folder = save(tmp_path / "in", encoder())
    write_back = partial(jp.to_huggingface, tmp_path / "out", layout, state, origin=folder)
    refused(lambda: write_back({"classifier/*": None}), "without a rule: layers/Dense_0/bias, layers/Dense_0/kernel")
    refused(lambda: write_back(LINEN, dtype="int8"), "dtype='int8'")
    refused(lambda: write_back(LINEN, origin=tmp_path), "origin=")
    refused(lambda: jp.to_huggingface(tmp_path / "out", model, state, LINEN, origin=folder), "layout=")
    refused(lambda: jp.to_huggingface(folder, layout, state, LINEN, origin=folder), "holds model.safetensors")


def test_rows_of_concatenated_tensors_follow_the_order_of_the_rules():
    leaves = {"b": jax.ShapeDtypeStruct((2, 3), "f4"), "a": jax.ShapeDtypeStruct((5, 3), "f4")}
    mappings, problems = expand({"b": ("w", "x+ d -> x d"), "a": ("w", "x+ d -> x d")}, leaves)
    assert not problems
    assert (mappings["b"].part, mappings["a"].part) == (slice(0, 2), slice(2, 7))
