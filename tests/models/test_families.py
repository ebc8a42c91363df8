"""Families of Hugging Face: what transformers computed of tiny random models is what the decoder computes.

tests/models/huggingface  the models, their logits and 50 greedy tokens (make.py says how)
"""

import contextlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from pairwise import some
from published_configs import PUBLISHED

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.models.decoder import Decoder
from jaxpar.models.huggingface.config import differences, make_config, read_settings
from jaxpar.models.huggingface.param_mapping import param_mappings
from jaxpar.models.huggingface.weights import export, load
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.plan.model.shape import Shape

SAVED = Path(__file__).parents[1] / "models" / "huggingface"
MODELS = sorted(path.name for path in SAVED.iterdir() if path.is_dir())
GREEDY = [name for name in MODELS if (SAVED / name / "greedy.npy").exists()]
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
# keys that may differ: the last layer of windows that are off, and dropout in training
UNLIKE = {"max_window_layers", "attn_pdrop", "embd_pdrop", "resid_pdrop"}


def built(settings, params=None):
    """Returns a decoder with these parameters, or with random ones."""
    with nnx.use_eager_sharding(False):
        model = Decoder(settings, rngs=nnx.Rngs(0))
    if params:
        graph, state = nnx.split(model)
        flat = [
            (path, leaf.replace(jnp.asarray(params["/".join(path)][...]))) for path, leaf in nnx.to_flat_state(state)
        ]
        model = nnx.merge(graph, nnx.from_flat_state(flat))
    return model


def by_path(tree):
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(GREEDY, ["gemma2"], ["gemma3", "smollm3", "qwen2", "gpt_neox", "mixtral"]))
def test_fifty_greedy_tokens_are_those_of_transformers(name):
    want = np.load(SAVED / name / "greedy.npy", allow_pickle=False).astype(np.int32)
    saved = load(SAVED / name)
    graph, state = nnx.split(built(saved.settings, saved.params))

    @jax.jit
    def generate(state, prompt):
        model = nnx.merge(graph, state)

        def one(carry, _):
            logits, cache = carry
            token = jnp.argmax(logits, axis=-1)
            return model.decode(token[:, None], cache), token

        start = model.decode(prompt, model.cache(2, 64), jnp.full((2,), 6))
        return jax.lax.scan(one, start, None, length=50)[1].T

    np.testing.assert_array_equal(generate(state, want[:, :6]), want[:, 6:])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_goes_out_as_the_family_that_it_came_as(name, tmp_path):
    saved = load(SAVED / name)
    export(saved.params, saved.settings, tmp_path, origin=SAVED / name)
    again = load(tmp_path)
    theirs = json.loads((SAVED / name / "config.json").read_text())
    ours = json.loads((tmp_path / "config.json").read_text())
    assert (again.kind, differences(again.settings, saved.settings)) == (saved.kind, [])
    shared = theirs.keys() & ours.keys() - {"torch_dtype", "rope_parameters", "rope_scaling"}
    differing = {key for key in shared if ours[key] != theirs[key] and theirs[key] is not None}
    assert differing <= UNLIKE
    for path, value in saved.params.items():
        assert again.params[path][...].tobytes() == value[...].tobytes(), path


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_row_and_is_counted(name):
    saved = load(SAVED / name)
    with nnx.use_eager_sharding(False):
        state = nnx.eval_shape(lambda: nnx.state(Decoder(saved.settings, rngs=nnx.Rngs(0)), nnx.Param))
    shapes = {"/".join(path): leaf.get_value().shape for path, leaf in nnx.to_flat_state(state)}
    assert shapes == {rule.path: rule.shape for rule in param_mappings(saved.kind, saved.settings)}
    if not saved.settings.experts.count:
        assert Shape.from_settings(saved.settings).parameters == sum(np.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_and_have_their_numbers_of_parameters(name):
    config, parameters = PUBLISHED[name]
    kind, settings = read_settings(config)
    assert sum(np.prod(rule.shape, dtype=int) for rule in param_mappings(kind, settings)) == parameters
    assert differences(settings, read_settings(make_config(settings, "bfloat16", origin=kind)[1])[1]) == []
    if not settings.experts.count:
        assert Shape.from_settings(settings).parameters == parameters


# model, keys without a value, keys with another, setting, its value: the configuration classes of transformers 4.57
MISSING_KEYS = [
    ("gemma2", ["hidden_activation"], {}, "activation_name", "gelu_tanh"),
    ("gemma3", ["hidden_activation"], {"hidden_act": "gelu"}, "activation_name", "gelu_tanh"),
    ("gemma", [], {"hidden_act": "gelu"}, "activation_name", "gelu_tanh"),
    ("gemma", [], {"hidden_act": "gelu", "hidden_activation": "gelu"}, "activation_name", "gelu"),
    ("gemma", [], {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "activation_name", "gelu_tanh"),
    ("gemma", ["hidden_activation", "hidden_act"], {}, "activation_name", "gelu_tanh"),
    ("gpt_neox", ["hidden_act"], {}, "activation_name", "gelu"),
    ("starcoder2", ["use_bias"], {}, "use_bias", True),
    ("starcoder2", [], {"use_bias": False, "mlp_type": "default"}, "use_bias", False),
    ("phi", ["hidden_act"], {}, "activation_name", "gelu_tanh"),
    ("phi", ["partial_rotary_factor"], {}, "rope_share", 0.5),
    ("gpt2", ["activation_function"], {}, "activation_name", "gelu_tanh"),
    ("llama", ["hidden_act"], {}, "activation_name", "silu"),
    ("qwen2", ["sliding_window", "layer_types"], {}, "windows", (0, 4096, 4096)),
    ("smollm3", ["sliding_window", "layer_types"], {"use_sliding_window": True}, "windows", ()),
    ("smollm3", ["layer_types"], {"use_sliding_window": True, "sliding_window": 8}, "windows", (0, 0, 0, 8)),
    ("qwen3", [], {"use_sliding_window": False, "sliding_window": 0}, "windows", ()),
    ("mistral", [], {"num_key_value_heads": None}, "kv_heads", 0),
    ("mixtral", [], {"num_key_value_heads": None}, "kv_heads", 0),
    ("qwen3", [], {"num_key_value_heads": None}, "kv_heads", 0),
]


@pytest.mark.parametrize(("name", "missing", "keys", "setting", "value"), MISSING_KEYS)
def test_a_key_that_a_config_lacks_has_the_value_that_transformers_gives_it(name, missing, keys, setting, value):
    config = json.loads((SAVED / name / "config.json").read_text()) | keys
    _, settings = read_settings({key: item for key, item in config.items() if key not in missing})
    assert getattr(settings, setting) == value


@pytest.mark.parametrize("name", MODELS)
def test_a_config_without_any_one_key_is_read_as_transformers_reads_it(name):
    AutoConfig = pytest.importorskip("transformers").AutoConfig
    kind, saved = read_settings(json.loads((SAVED / name / "config.json").read_text()))
    config = make_config(saved, "float32", origin=kind)[1]
    config.pop("rope_parameters", None)  # of version 5
    compared = 0
    for key in config.keys() - {"model_type"}:
        for shorter in ({k: v for k, v in config.items() if k != key}, config | {key: None}):
            try:
                theirs = AutoConfig.for_model(**shorter).to_dict()
                ours, full = read_settings(shorter)[1], read_settings(theirs)[1]
            except (JaxparError, ValueError, TypeError):  # a key of the shape, or one that may not be null
                continue
            assert differences(ours, full) == [], key
            compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"rope_scaling": {"rope_type": "default"}}),
        ("phi3", {"rope_scaling": {"type": "default"}}),
        ("gpt_neox", {"rope_scaling": {"type": "default", "rope_type": "default"}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
        ("llama", {"quantization_config": None, "sliding_window": None, "use_sliding_window": False}),
        ("olmo2", {"layer_types": ["full_attention"] * 2, "mlp_bias": False}),
        ("mistral", {"attention_bias": False}),
        ("llama", {"architectures": []}),
    ],
)
def test_keys_of_other_families_that_change_nothing_are_no_reason_to_refuse(name, keys):
    config = json.loads((SAVED / name / "config.json").read_text())
    assert read_settings(config | keys) == read_settings(config)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"layer_types": ["sliding_attention"] * 2}),
        ("mistral", {"layer_types": ["full_attention"] * 2}),  # and a window
        ("mistral", {"attention_bias": True}),
        ("llama", {"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 2.0}}),
    ],
)
def test_keys_of_other_families_that_would_change_something_are_refused(name, keys):
    config = json.loads((SAVED / name / "config.json").read_text())
    with pytest.raises(JaxparError, match=next(iter(keys))):
        read_settings(config | keys)


def test_rotary_frequencies_have_two_names_of_their_kind():
    config = json.loads((SAVED / "llama" / "config.json").read_text())
    stretch = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    for kind in ({"type": "llama3"}, {"type": "llama3", "rope_type": "llama3"}):
        assert read_settings(config | {"rope_scaling": stretch | kind})[1].rope_stretch == (8.0, 1.0, 4.0, 8192.0)


def test_long_factors_are_those_of_sequences_or_caches_beyond_the_original_length():
    saved = load(SAVED / "phi3_longrope")
    model = built(saved.settings, saved.params)
    tokens = (np.arange(40).reshape(2, 20) * 7 % 40).astype(np.int32)
    short, long = np.asarray(model(tokens[:, :12])), np.asarray(model(tokens))[:, :12]
    assert np.abs(short - long).max() > 0.01
    for positions, expected in ((16, short), (17, long)):
        logits, cache = model.decode(tokens[:, :11], model.cache(2, positions), jnp.full((2,), 11))
        np.testing.assert_allclose(logits, expected[:, 10], rtol=1e-5, atol=1e-5)
        logits, _ = model.decode(tokens[:, 11:12], cache)
        np.testing.assert_allclose(logits, expected[:, 11], rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "gemma2": {"pipe": 2, "tensor": 2, "fsdp": 2},  # windows, softcaps, tied
    "smollm3": {"pipe": 2, "data": 2, "fsdp": 2},  # layers without positions
    "mistral": {"context": 2, "tensor": 2, "fsdp": 2},  # windows
    "qwen3": {"pipe": 2, "context": 2, "fsdp": 2},  # norms of each head
    "olmo2": {"data": 2, "fsdp": 2, "tensor": 2},  # norms over all heads, after the layers
    "mixtral": {"expert": 2, "tensor": 2, "fsdp": 2},
    "gpt_neox": {"pipe": 2, "tensor": 2, "data": 2},  # attention and feed-forward side by side
    "gemma3": {"data": 2, "fsdp": 2, "tensor": 2},  # 7 layers, of which the last begins the pattern anew
    "qwen2": {"fsdp": 4, "tensor": 2},
    "granite": {"fsdp": 2, "context": 2, "tensor": 2},
    "phi3": {"data": 2, "fsdp": 2, "tensor": 2},
    "olmoe": {"expert": 4, "data": 2},
    "starcoder2": {"context": 2, "fsdp": 2, "tensor": 2},
    "phi": {"pipe": 2, "fsdp": 2, "tensor": 2},  # a norm for two parts, and a bias of the head
    "gemma": {"data": 2, "fsdp": 2, "tensor": 2},
    "olmo": {"pipe": 2, "fsdp": 2, "tensor": 2},  # norms without parameters
    "qwen3_yarn": {"fsdp": 4, "tensor": 2},
    "phi3_longrope": {"context": 2, "fsdp": 2, "tensor": 2},
    "phi3_longer": {"pipe": 2, "fsdp": 2, "tensor": 2},
    "qwen3_moe": {"expert": 2, "pipe": 2, "fsdp": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(LAYOUTS, ["gemma2"], ["smollm3", "mistral", "qwen3", "olmo2", "mixtral"]))
def test_a_family_trains_on_any_mesh_as_plain_flax_on_one_device(name):
    settings = load(SAVED / name).settings
    settings = replace(settings, layers=8) if name == "smollm3" else settings
    if name == "phi3_longrope":  # the rows, not a device's half of each, are longer than the original length
        settings = replace(settings, longrope=replace(settings.longrope, seq=12))
    settings = replace(settings, experts=replace(settings.experts, balance=0.0))
    tokens = (np.random.default_rng(0).zipf(1.3, (16, 17)) % 40).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    layout = jp.compose(partial(Decoder, settings), jp.Parallel(**LAYOUTS[name]))
    step = jp.train_step(layout, jp.next_token_loss, OPTIMIZER)
    state, losses = jp.init_state(layout, OPTIMIZER, seed=0), []
    first = by_path(state.params)
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))

    graph, params = nnx.split(built(settings))
    flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    start = {path: jnp.asarray(first[path]) for path in flat}

    def loss(values):
        whole = nnx.from_flat_state([(path, leaf.replace(values["/".join(map(str, path))]))
                                     for path, leaf in nnx.to_flat_state(params)])  # fmt: skip
        logits = nnx.merge(graph, whole)(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    alone, optimizer_state = start, OPTIMIZER.init(start)
    for expected in losses:
        value, gradients = jax.jit(jax.value_and_grad(loss))(alone)
        assert float(value) == pytest.approx(expected, rel=1e-5)
        updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, alone)
        alone = optax.apply_updates(alone, updates)
    for path, value in alone.items():
        np.testing.assert_allclose(by_path(state.params)[path], np.asarray(value), atol=2e-5, err_msg=path)


@pytest.mark.nightly
def test_stages_of_a_pipeline_have_the_same_kinds_of_layers():
    settings = DecoderConfig(vocab=40, seq=16, layers=6, dim=16, heads=2, windows=(4, 0))
    layout = jp.compose(partial(Decoder, settings), jp.Parallel(pipe=2, data=4))
    step, tokens = jp.train_step(layout, jp.next_token_loss, OPTIMIZER), np.zeros((16, 16), np.int32)
    state = jp.init_state(layout, OPTIMIZER, seed=0)
    with pytest.raises(JaxparError, match="a stage of 3 layers whose kinds repeat every 2"):
        step(state, {"inputs": tokens, "targets": tokens})


def settings_with(draw):
    """Draws settings of any family, and some of none."""
    gated = draw(st.booleans())
    layers = draw(st.integers(1, 4))
    return DecoderConfig(
        vocab=40, seq=16, layers=layers, dim=16, heads=4, kv_heads=draw(st.sampled_from([0, 1, 2, 4])),
        head_dim=draw(st.sampled_from([0, 4, 8])), hidden=24, gated=gated, tied=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "zero_centered_rms", "layer", "nonparametric_layer"])),
        norm_position=draw(st.sampled_from(["pre", "post", "both"])),
        qk_norm=draw(st.sampled_from(["none", "head", "all_heads"])),
        activation=draw(st.sampled_from(["", "silu", "gelu", "gelu_tanh"])),
        biases=draw(st.sampled_from([(), ("qkv",), ("qkv", "out"), ("mlp",), ("qkv", "out", "mlp")])),
        rope_base=draw(st.sampled_from([1e4, 1e6])), windows=draw(st.sampled_from([(), (4,), (4, 0)]))[:layers],
        attention_scale=draw(st.sampled_from([0.0, 0.3])), logits_softcap=draw(st.sampled_from([0.0, 30.0])),
        rope_share=draw(st.sampled_from([1.0, 0.5])), parallel_residual=draw(st.booleans()),
        head_bias=draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.nightly
@given(st.data())
def test_what_is_written_reads_back_as_the_same_model_or_is_refused(data):
    settings = settings_with(data.draw)
    with contextlib.suppress(JaxparError):
        kind, config = make_config(settings, "float32")
        assert (kind, differences(settings, read_settings(config)[1])) == (config["model_type"], [])


@pytest.mark.nightly
@pytest.mark.parametrize("chunks", [False, True], ids=["whole logits", "in chunks"])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "head"])
def test_a_padded_vocabulary_changes_no_number(tied, chunks, tmp_path):
    plain = DecoderConfig(vocab=37, seq=16, layers=2, dim=16, heads=4, tied=tied)
    tokens = (np.random.default_rng(0).zipf(1.3, (16, 17)) % 37).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss = partial(jp.next_token_loss, largest=0) if chunks else jp.next_token_loss

    def trained(settings, parallel, devices=None):
        layout = jp.compose(partial(Decoder, settings), parallel, devices)
        step, state, losses = jp.train_step(layout, loss, OPTIMIZER), jp.init_state(layout, OPTIMIZER, seed=0), []
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, by_path(state.params)

    padded = replace(plain, padded_vocab=48)
    losses, params = trained(padded, jp.Parallel(fsdp=2, tensor=4) if tied else jp.Parallel(pipe=2, tensor=4))
    expected, alone = trained(plain, jp.Parallel(), jax.devices()[:1])
    assert losses == pytest.approx(expected, rel=1e-5)
    for path, value in alone.items():
        surplus = tuple(
            slice(n, None) if m > n else slice(None) for n, m in zip(value.shape, params[path].shape, strict=True)
        )
        np.testing.assert_allclose(params[path][tuple(map(slice, value.shape))], value, atol=2e-5, err_msg=path)
        assert params[path].shape == value.shape or not params[path][surplus].any()
    export(params, padded, tmp_path)
    again = load(tmp_path, padded_vocab=48)
    assert (load(tmp_path).settings.vocab, again.settings.vocab_rows) == (37, 48)
    for path, value in params.items():
        assert again.params[path][...].tobytes() == value.tobytes(), path
    rows = again.params["embed"]
    np.testing.assert_array_equal(rows[30:42, 3:5], params["embed"][30:42, 3:5])


def test_a_padded_vocabulary_pads_the_bias_of_the_head(tmp_path):
    plain, padded = load(SAVED / "phi"), load(SAVED / "phi", padded_vocab=48)
    tokens = (np.arange(24).reshape(2, 12) * 7 % 40).astype(np.int32)
    assert padded.params["head_bias"][...].shape == (48,)
    logits = built(padded.settings, padded.params)(tokens)
    np.testing.assert_allclose(logits[..., :40], built(plain.settings, plain.params)(tokens), rtol=1e-5, atol=1e-5)
    assert (np.asarray(logits[..., 40:]) < -1e30).all()
    export(padded.params, padded.settings, tmp_path)
    assert load(tmp_path).params["head_bias"][...].tobytes() == plain.params["head_bias"][...].tobytes()


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(LAYOUTS, ["phi3"], ["gemma2", "mixtral"]))
def test_adapters_are_trained_on_a_cube_and_merged_into_what_transformers_reads(name, tmp_path):
    saved = load(SAVED / name)
    paths = ["blocks/attention/*"] if saved.settings.experts.count else ["blocks/attention/*", "blocks/mlp/*"]
    model = jp.add_lora(partial(Decoder, saved.settings), rank=2, alpha=8.0, paths=paths)
    layout = jp.compose(model, jp.Parallel(data=2, fsdp=2, tensor=2))
    optimizer = jp.freeze(optax.adam(0.05), ["*"], but=["adapters"])
    start = jp.init_state(layout, optimizer, params=dict(saved.params))
    step, tokens = jp.train_step(layout, jp.next_token_loss, optimizer), np.arange(16 * 17).reshape(16, 17) * 7 % 40
    batch = {"inputs": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}
    state = start
    for _ in range(2):
        state, _ = step(state, batch)
    tuned = jp.model(layout, state, device=jax.devices()[0])
    params = {"/".join(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(tuned, nnx.Param))}
    export(params, saved.settings, tmp_path, origin=SAVED / name)
    again = load(tmp_path)
    logits = nnx.jit(built(again.settings, again.params))(batch["inputs"])
    np.testing.assert_allclose(logits, nnx.jit(tuned)(batch["inputs"]), rtol=1e-5, atol=1e-5)
    change = again.params["blocks/attention/query"][...] - saved.params["blocks/attention/query"][...]
    assert again.kind == saved.kind
    assert 0.01 < np.abs(change).max() < 1
    assert np.linalg.matrix_rank(change[0].reshape(change.shape[1], -1), tol=1e-4) <= 2


@pytest.mark.nightly
def test_layers_of_several_kinds_send_for_gpus_what_equal_layers_send():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    tokens = jax.ShapeDtypeStruct((16, 128), jnp.int32)
    sent = []
    for windows in ((), (32, 0)):
        settings = DecoderConfig(vocab=256, seq=128, layers=4, dim=64, heads=4, windows=windows)
        layout = jp.compose(partial(Decoder, settings), jp.Parallel(fsdp=8), jp.target_devices("h100:1x8"))
        step = jp.train_step(layout, jp.next_token_loss, OPTIMIZER, precision="bf16")
        ledger = jp.inspect(step, {"inputs": tokens, "targets": tokens}).ledger
        kinds = {entry.kind for entry in ledger if entry.parameters}
        sent.append({kind: sum(e.step_wire for e in ledger if e.kind == kind and e.parameters) for kind in kinds})
    assert sent[0].keys() == {"all-gather", "reduce-scatter"}
    assert sent[1] == sent[0]
