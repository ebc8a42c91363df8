"""Llama and GPT-2 of Hugging Face are read and written: the same logits, the same bits, and nothing left unsaid.

tests/models/huggingface  tiny random models and the logits that transformers computed of them (make.py says how)
transformers            compared at once where it is installed
"""

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from pairwise import some

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.job.run_weights import start_from_params
from jaxpar.models.decoder import Decoder, layer_kinds
from jaxpar.models.huggingface.config import differences, make_config, read_settings
from jaxpar.models.huggingface.param_mapping import param_mappings
from jaxpar.models.huggingface.safetensors import DTYPES, TensorSource, entries, write
from jaxpar.models.huggingface.weights import export, load
from jaxpar.models.rotary import Rope
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.models.settings.rope import YarnConfig

SAVED = Path(__file__).parents[1] / "models" / "huggingface"
MODELS = sorted(path.name for path in SAVED.iterdir() if path.is_dir())
TOKENS = np.arange(24).reshape(2, 12) * 7 % 40
LLAMA = DecoderConfig(vocab=40, seq=16, layers=3, dim=16, heads=4, kv_heads=2, hidden=24, norm_eps=1e-6)
GPT2 = replace(
    LLAMA, kv_heads=0, position="learned", norm="layer", gated=False, use_bias=True, tied=True, norm_eps=1e-5
)
SETTINGS = {
    "llama": LLAMA, "tied llama": replace(LLAMA, tied=True, kv_heads=0), "biased llama": replace(LLAMA, use_bias=True),
    "one head of keys": replace(LLAMA, kv_heads=1, rope_base=500_000.0), "gpt2": GPT2,
    "stretched": replace(LLAMA, heads=1, kv_heads=1, rope_base=50.0, rope_stretch=(8.0, 0.5, 2.0, 32.0)),
    "yarn": replace(LLAMA, heads=1, kv_heads=1, rope_base=50.0, rope_yarn=YarnConfig(factor=4.0, seq=32)),
    "untied gpt2": replace(GPT2, tied=False, hidden=0),
}  # fmt: skip


def born(settings, seed=0):
    """Returns random parameters by path, biases and norms too, so that none can be swapped unseen."""
    with nnx.use_eager_sharding(False):
        like = nnx.eval_shape(lambda: nnx.state(Decoder(settings, rngs=nnx.Rngs(0)), nnx.Param))
    rng = np.random.default_rng(seed)
    return {
        "/".join(path): rng.normal(size=leaf.get_value().shape).astype(np.float32) * 0.3
        for path, leaf in nnx.to_flat_state(like)
    }


def logits(settings, params):
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0))))
    flat = [(path, leaf.replace(jnp.asarray(params["/".join(path)][...]))) for path, leaf in nnx.to_flat_state(state)]
    return np.asarray(nnx.merge(graph, nnx.from_flat_state(flat))(jnp.asarray(TOKENS, jnp.int32)))


def changed(folder, to, **keys):
    """Returns a copy of a saved model with other keys in its config; None takes a key out."""
    shutil.copytree(SAVED / folder, to)
    config = json.loads((to / "config.json").read_text()) | keys
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "out"}))
    return to


def refused(call, *words, problems=1):
    with pytest.raises(JaxparError) as caught:
        call()
    text = str(caught.value)
    assert not [word for word in words if word not in text], text
    assert len(caught.value.problems) == problems, text


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", some(MODELS, ["llama", "llama_tied"]))
def test_imported_logits_are_those_that_transformers_computed(name):
    model = load(SAVED / name)
    want = np.load(SAVED / name / "logits.npy", allow_pickle=False)
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(logits(model.settings, model.params), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # torch alone takes seconds to import; what transformers computed is saved for the tests above
@pytest.mark.parametrize("name", SETTINGS)
def test_transformers_computes_the_same_logits_of_what_is_exported(name, tmp_path):
    torch = pytest.importorskip("torch", reason="without torch the saved logits alone are compared")
    transformers = pytest.importorskip(
        "transformers", reason="without transformers the saved logits alone are compared"
    )
    params = born(SETTINGS[name])
    export(params, SETTINGS[name], tmp_path, max_file_bytes=4000)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        want = theirs.eval()(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(logits(SETTINGS[name], params), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [5 * 10**9, 3000, 1], ids=["one file", "several", "a file for each tensor"])
@pytest.mark.parametrize("name", some(SETTINGS, ["tied llama"]))
def test_export_and_import_again_is_bitwise(name, most, tmp_path):
    params = born(SETTINGS[name])
    written = export(params, SETTINGS[name], tmp_path, max_file_bytes=most)
    assert {path.name for path in written} == {path.name for path in tmp_path.iterdir()}
    assert (len(written) == 2) == (most > 10**9)
    again = load(tmp_path)
    assert replace(again.settings, kv_heads=0, hidden=0) == replace(SETTINGS[name], kv_heads=0, hidden=0)
    assert (again.settings.width, again.settings.kv_heads or 4) == (
        SETTINGS[name].width,
        SETTINGS[name].kv_heads or 4,
    )
    assert again.params.keys() == params.keys()
    for path, value in params.items():
        assert again.params[path][...].tobytes() == value.tobytes(), path


@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_again_gives_the_same_tensors(name, tmp_path):
    model = load(SAVED / name)
    export(model.params, model.settings, tmp_path)
    before, after = entries(SAVED / name / "model.safetensors"), entries(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for key, entry in before.items():
        assert entry.view().tobytes() == after[key].view().tobytes(), key


@pytest.mark.parametrize("name", SETTINGS)
def test_the_table_has_a_rule_for_every_parameter(name):
    settings = SETTINGS[name]
    kind = "gpt2" if "gpt2" in name else "llama"
    told = {rule.path: rule.shape for rule in param_mappings(kind, settings)}
    assert told == {path: value.shape for path, value in born(settings).items()}


def test_a_part_is_read_without_the_rest():
    params = load(SAVED / "gpt2").params
    for path, tensor in params.items():
        whole = tensor[...]
        assert whole.shape == tensor.shape
        halves = tuple(slice(size // 2, None) for size in whole.shape)
        for index in (halves, halves[:1], tuple(slice(None) for _ in whole.shape), (0,), (slice(0, 0),)):
            assert (tensor[index] == whole[index]).all(), (path, index)


def test_sixteen_bits_are_read_as_they_are_and_written_rounded(tmp_path):
    params = born(LLAMA)
    export(params, LLAMA, tmp_path, dtype="bfloat16")
    held = entries(tmp_path / "model.safetensors")
    assert {entry.dtype for entry in held.values()} == {np.dtype(jnp.bfloat16)}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = load(tmp_path).params
    for path, value in params.items():
        assert (again[path][...] == value.astype(jnp.bfloat16).astype(np.float32)).all()
        assert again[path][...].dtype == np.float32


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "parallel",
    [jp.Parallel(fsdp=4, tensor=2, zero=3), pytest.param(jp.Parallel(data=8), marks=pytest.mark.slow)],
    ids=["3d", "data"],
)
def test_parameters_are_born_sharded_and_leave_from_any_layout(parallel, tmp_path):
    model = load(SAVED / "llama")
    layout = jp.compose(lambda rngs: Decoder(model.settings, rngs=rngs), parallel)
    state = start_from_params(layout, optax.adam(1e-3), model.params)
    for path, place in layout.placements.items():
        value = state.params
        for word in path.split("/"):
            value = value[word]
        assert value.sharding.is_equivalent_to(layout.sharding(place.stored), value.ndim)
        assert (np.asarray(value) == model.params[path][...]).all()
    export(state.params, model.settings, tmp_path)
    again = load(tmp_path)
    assert all((again.params[path][...] == model.params[path][...]).all() for path in model.params)


def test_parameters_of_another_model_do_not_begin_a_run():
    model = load(SAVED / "llama")
    layout = jp.compose(
        lambda rngs: Decoder(replace(model.settings, hidden=32, tied=True), rngs=rngs), jp.Parallel(data=8)
    )
    refused(
        lambda: start_from_params(layout, optax.adam(1e-3), model.params), "head", "blocks/mlp/up", "not [", problems=2
    )


STRETCHED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
# key, value, what is said
CONFIGS = [
    ("gemma3", "attn_logit_softcapping", 50.0, "attn_logit_softcapping = None"),
    ("gemma3", "layer_types", ["full_attention"], "names the attention of each layer"),
    ("phi3", "rope_scaling", {"type": "longrope", "short_factor": [1.0]}, "lists short_factor and long_factor"),
    ("phi3", "rope_scaling", LONGROPE | {"type": "dynamic"}, "rope_scaling", "dynamic"),
    ("phi3", "rope_scaling", LONGROPE | {"factor": 2.0}, "rope_scaling", "longrope"),
    ("phi3", "rope_scaling", LONGROPE | {"long_factor": [1.0, -2.0]}, "longrope.long_factors", "a factor above 0"),
    ("phi3", "rope_scaling", LONGROPE | {"long_factor": [1.0]}, "2 short and 1 long factors for 2 pairs"),
    ("phi3", "rope_parameters", LONGROPE | {"original_max_position_embeddings": 8},
     "original_max_position_embeddings = 4096, and 8"),
    ("llama", "rope_scaling", LONGROPE, "rope_scaling", "longrope"),
    ("llama", "rope_scaling", {"rope_type": "yarn"}, "rope_scaling", "yarn with factor"),
    ("llama", "rope_scaling", YARN | {"finetuned": True}, "rope_scaling", "finetuned"),
    ("llama", "rope_scaling", YARN | {"factor": 0.5}, "model.rope_yarn.factor = 0.5"),
    ("llama", "rope_scaling", YARN | {"truncate": 1}, "truncate is true or false"),
    ("llama", "rope_scaling", YARN | {"beta_slow": 64.0}, "fast pairs turn more often"),
    ("llama", "rope_scaling", YARN | {"attention_factor": 0}, "attention_factor is a number above 0"),
    ("llama_yarn", "original_max_position_embeddings", 8, "original_max_position_embeddings = 8, and 32"),
    ("qwen2", "sliding_window", "4", "sliding_window is a whole number"),
    ("smollm3", "no_rope_layers", [1, 0], "a list of 0 and 1, one for each layer"),
    ("granite", "logits_scaling", 0, "logits_scaling is a number above 0"),
    ("mixtral", "num_experts_per_tok", 5, "per_token = 5"),
    ("qwen3_moe", "mlp_only_layers", [0], "mlp_only_layers = []"),
    ("starcoder2", "use_bias", "yes", "use_bias = True or False"),
    ("starcoder2", "hidden_act", "relu", "hidden_act"),
    ("starcoder2", "sliding_window", 4.5, "sliding_window is a whole number"),
    ("phi", "qk_layernorm", True, "qk_layernorm = False"),
    ("phi", "attention_bias", True, "attention_bias"),
    ("olmo", "clip_qkv", 8.0, "clip_qkv = None"),
    ("olmo", "rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling = None"),
    ("olmo", "rms_norm_eps", 1e-6, "rms_norm_eps = 1e-06"),
    ("gemma", "hidden_activation", "gelu", "hidden_activation = 'gelu', hidden_act = 'gelu_pytorch_tanh'"),
    ("gemma", "hidden_activation", "relu", "hidden_activation = 'relu'"),
    ("olmoe", "clip_qkv", 8.0, "clip_qkv = None"),
    ("gpt_neox", "rope_theta", 5e5, "rotary_emb_base"),
    ("llama", "model_type", "bert", "'bert'", "llama, gpt2"),
    ("llama", "architectures", ["LlamaForSequenceClassification"], "LlamaForCausalLM"),
    ("llama", "hidden_act", "relu", "hidden_act", "silu"),
    ("llama", "rope_parameters", {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}, "rope_scaling", "dynamic"),
    ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling", "linear"),
    ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_scaling", "low_freq_factor"),
    ("llama", "rope_scaling", STRETCHED | {"factor": "8"}, "rope_scaling", "are positive"),
    ("llama", "rope_scaling", STRETCHED | {"low_freq_factor": 5.0}, "rope_stretch", "0 < low < high"),
    ("llama", "rope_theta", 5e5, "rope_theta = 500000.0", "rope_parameters"),
    ("llama", "attention_bias", True, "missing: model.layers.0.self_attn.q_proj.bias"),
    ("llama", "mlp_bias", True, "missing: model.layers.0.mlp.gate_proj.bias"),
    ("llama", "head_dim", 8, "model.layers.0.self_attn.o_proj.weight [16, 16], not [16, 32]"),
    ("llama", "sliding_window", 4096, "sliding_window"),
    ("llama", "quantization_config", {"bits": 4}, "quantization_config"),
    ("llama", "num_attention_heads", "4", "num_attention_heads = '4'", "int"),
    ("llama", "hidden_size", "out", "hidden_size is missing"),
    ("llama", "rms_norm_eps", True, "rms_norm_eps"),
    ("llama", "rms_norm_eps", float("nan"), "norm_eps = nan"),
    ("llama", "num_hidden_layers", 2**31 - 1, "layers"),
    ("llama", "vocab_size", 41, "model.embed_tokens.weight [40, 16], not [41, 16]", "lm_head.weight"),
    ("llama", "tie_word_embeddings", True, "not of this model: lm_head.weight"),
    ("gpt2", "activation_function", "relu", "activation_function", "gelu_new"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", "scale_attn_weights", False, "scale_attn_weights"),
    ("gpt2", "add_cross_attention", True, "add_cross_attention"),
    ("gpt2", "n_inner", 32, "transformer.h.0.mlp.c_fc.weight [16, 64], not [16, 32]"),
    ("gpt2", "n_layer", 3, "missing: transformer.h.2.ln_1.weight"),
    ("gpt2", "n_layer", 1, "not of this model: transformer.h.1.attn.c_attn.bias"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value", "words"), [(n, k, v, w) for n, k, v, *w in CONFIGS])
def test_what_the_decoder_cannot_do_is_refused_by_name(name, key, value, words, tmp_path):
    folder = changed(name, tmp_path / "model", **{key: value})
    refused(lambda: load(folder), *words)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_frequencies_are_stretched_as_versions_4_and_5_write_it(key, tmp_path):
    folder = changed("llama", tmp_path / "model", **{key: STRETCHED})
    assert load(folder).settings == replace(load(SAVED / "llama").settings, rope_stretch=(8.0, 1.0, 4.0, 8192.0))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_is_read_as_versions_4_and_5_write_it(key, tmp_path):
    folder = changed("llama", tmp_path / "model", **{key: YARN | {"beta_fast": None, "attention_factor": 1.5}})
    yarn = YarnConfig(factor=4.0, seq=8, attention_factor=1.5)
    assert load(folder).settings == replace(load(SAVED / "llama").settings, rope_yarn=yarn)


def test_yarn_without_a_length_scales_the_model_s_own(tmp_path):
    folder = changed("llama", tmp_path / "model", rope_scaling={"type": "yarn", "factor": 4})
    assert load(folder).settings.rope_yarn == YarnConfig(factor=4.0, seq=16)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_has_the_names_of_phi_3_s_folders(kind, tmp_path):
    rope = {"rope_scaling": LONGROPE | {"type": kind}, "original_max_position_embeddings": 16}
    settings = load(changed("phi3", tmp_path / "model", **rope)).settings
    longrope = settings.longrope
    assert (longrope.seq, longrope.short_factors, longrope.long_factors) == (16, (1.0, 1.5), (2.0, 4.0))
    assert longrope.attention_factor == pytest.approx((1 + np.log(64 / 16) / np.log(16)) ** 0.5)


def long_phi3(seq, **longrope):
    longrope = {"seq": 16, "short_factors": [1.0, 1.5], "long_factors": [2.0, 4.0]} | longrope
    return replace(load(SAVED / "phi3").settings, seq=seq, longrope=longrope)


@pytest.mark.parametrize(("seq", "expected"), [(64, 1.5**0.5), (16, 1.0), (8, 1.0)])
def test_an_exported_phi3_has_the_attention_factor_that_transformers_computes(seq, expected):
    settings = long_phi3(seq)
    assert [kind.rope.magnitude for kind in layer_kinds(settings)] == [pytest.approx(expected)]
    config = make_config(settings, "float32", origin="phi3")[1]
    assert differences(settings, read_settings(config)[1]) == []
    assert make_config(long_phi3(seq, attention_factor=expected), "float32", origin="phi3")[1] == config
    assert config["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    transformers = pytest.importorskip("transformers", reason="without transformers nothing reads the folder")
    assert transformers.Phi3Config(**config).max_position_embeddings == seq


def test_an_attention_factor_that_no_phi3_folder_has_is_refused():
    refused(lambda: make_config(long_phi3(64, attention_factor=2.0), "float32", origin="phi3"),
            "longrope.attention_factor = 2.0 with model.seq = 64", "here it is 1.22474",
            "longrope.attention_factor = 0")  # fmt: skip


def test_rotary_frequencies_are_scaled_in_one_way():
    refused(lambda: replace(LLAMA, rope_stretch=(8.0, 1.0, 4.0, 16.0), rope_yarn=YarnConfig(factor=2.0, seq=8)),
            "rope_stretch and rope_yarn", "scaled in one way")  # fmt: skip
    refused(
        lambda: replace(LLAMA, longrope={"seq": 8, "short_factors": 2.0}),
        "longrope.short_factors = 2.0",
        "a factor above 0",
    )
    refused(lambda: replace(LLAMA, rope_base=1.0, rope_yarn=YarnConfig(factor=2.0, seq=8)), "rope_base of 1")


LONG = {"seq": 8, "short_factors": [1.0] * 2, "long_factors": [2.0] * 2}
# settings, what is said
UNUSED = [
    ({"rope_yarn": {"seq": 32}}, "rope_yarn.seq = 32 without rope_yarn.factor"),
    ({"rope_yarn": {"attention_factor": -1.0}}, "rope_yarn.attention_factor = -1.0 without rope_yarn.factor"),
    ({"rope_yarn": {"factor": 4.0, "seq": 32, "attention_factor": -1.0}}, "model.rope_yarn.attention_factor = -1.0"),
    ({"rope_yarn": {"factor": "4", "seq": 32}}, "factor is a number"),
    ({"rope_yarn": {"factor": 4.0, "seq": 32, "truncate": "no"}}, "rope_yarn.truncate = 'no'"),
    ({"rope_yarn": [4.0]}, "rope_yarn = [4.0]", "YarnConfig", "factor, seq"),
    ({"longrope": 8}, "longrope = 8", "LongRopeConfig"),
    (
        {"longrope": {"short_factors": [1.0], "long_factors": [2.0]}},
        "longrope.short_factors = (1.0,)",
        "without longrope.seq",
    ),
    ({"longrope": LONG | {"attention_factor": -1.0}}, "model.longrope.attention_factor = -1.0"),
    ({"rope_yarn": {"factor": 4.0, "seq": 32}, "position": "learned"}, 'rope_yarn with position = "learned"'),
    ({"longrope": LONG, "position": "learned"}, 'longrope with position = "learned"'),
]


@pytest.mark.parametrize(("settings", "words"), [(settings, words) for settings, *words in UNUSED])
def test_scalings_that_would_be_ignored_are_refused(settings, words):
    refused(lambda: replace(LLAMA, **settings), *words)


def test_a_norm_is_shared_by_parts_that_read_the_same_stream():
    refused(lambda: replace(LLAMA, shared_norm=True), "shared_norm, parallel_residual = False")


def test_slow_pairs_are_stretched_fast_ones_are_not():
    plain, stretched = (Rope(500_000.0, stretch).frequencies(64) for stretch in ((), (8.0, 1.0, 4.0, 8192.0)))
    turns = np.asarray(plain) * 8192 / (2 * np.pi)
    ratio = np.asarray(plain / stretched)
    assert (ratio[turns > 4] == 1).all()
    np.testing.assert_allclose(ratio[turns < 1], 8, rtol=1e-6)
    assert (np.diff(ratio) >= -1e-5).all()
    assert ((ratio > 1.01) & (ratio < 7.9)).sum() >= 3


def test_everything_wrong_is_said_at_once(tmp_path):
    folder = changed("llama", tmp_path / "model", hidden_act="relu", sliding_window=8, attn_logit_softcapping=30.0)
    refused(lambda: load(folder), "hidden_act", "sliding_window", "attn_logit_softcapping", problems=3)


def test_keys_that_change_no_logit_change_none(tmp_path):
    folder = changed("gpt2", tmp_path / "model", use_cache=False, torch_dtype="bfloat16", attn_pdrop=0.3)
    assert load(folder).settings == load(SAVED / "gpt2").settings


def test_a_decoder_of_no_family_is_not_exported(tmp_path):
    for settings, words in (
        (replace(LLAMA, norm="layer"), "llama has norm = 'rms'"),
        (replace(GPT2, use_bias=False), "gpt2 has use_bias = True"),
        (replace(GPT2, kv_heads=2), "gpt2 has kv_heads = 4"),
    ):
        refused(lambda settings=settings: export(born(settings), settings, tmp_path / "no"), words)
    assert not (tmp_path / "no").exists()


def test_parameters_that_do_not_fit_are_named_before_anything_is_written(tmp_path):
    params = born(LLAMA) | {"blocks/mlp/down": np.zeros((3, 24, 17), np.float32), "extra": np.zeros(3)}
    del params["norm/scale"]
    refused(
        lambda: export(params, LLAMA, tmp_path),
        "missing: norm/scale",
        "extra",
        "[3, 24, 17], not [3, 24, 16]",
        problems=3,
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float64", "int8", "f32", 5])
def test_weights_are_written_in_floats(dtype, tmp_path):
    refused(lambda: export(born(LLAMA), LLAMA, tmp_path, dtype=dtype), repr(dtype), "float32, bfloat16, float16")


def test_a_model_is_not_written_over_another(tmp_path):
    export(born(LLAMA), LLAMA, tmp_path)
    refused(lambda: export(born(LLAMA), LLAMA, tmp_path), "holds", "another folder")
    refused(lambda: export(born(LLAMA), LLAMA, tmp_path / "config.json"), "config.json")


def with_tensors(tmp_path, change):
    """Returns a folder whose tensors were changed by `change(name -> array)`."""
    shutil.copytree(SAVED / "gpt2", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    held = {name: np.array(entry.view()) for name, entry in entries(file).items()}
    change(held)
    file.unlink()
    made = [TensorSource(name, value.dtype, value.shape, lambda value=value: value) for name, value in held.items()]
    write(tmp_path / "model", made, max_file_bytes=10**9)
    return tmp_path / "model"


def test_a_model_saved_without_its_head_and_with_its_masks_is_read(tmp_path):
    """As the released GPT-2 is: no prefix, and a causal mask among the weights."""

    def bare(held):
        for name in list(held):
            held[name.removeprefix("transformer.")] = held.pop(name)
        held["h.0.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), np.float32))

    model, saved = load(with_tensors(tmp_path, bare)), load(SAVED / "gpt2")
    assert all((model.params[path][...] == saved.params[path][...]).all() for path in saved.params)


def test_a_tied_head_that_was_saved_twice_is_the_same_one(tmp_path):
    embed = "transformer.wte.weight"
    folder = with_tensors(tmp_path / "same", lambda held: held.update({"lm_head.weight": held[embed]}))
    assert load(folder).settings.tied
    folder = with_tensors(tmp_path / "other", lambda held: held.update({"lm_head.weight": held[embed] + 1}))
    refused(lambda: load(folder), "lm_head.weight")


def test_whole_numbers_are_no_weights(tmp_path):
    folder = with_tensors(tmp_path, lambda held: held.update({"transformer.ln_f.bias": np.zeros(16, np.int32)}))
    refused(lambda: load(folder), "transformer.ln_f.bias I32", "F32, F16 or BF16")


def test_a_pickle_is_not_read(tmp_path):
    shutil.copy(SAVED / "gpt2" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    refused(lambda: load(tmp_path), "pytorch_model.bin", "pickle", "save_pretrained")


def header(told, data=b""):
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    return struct.pack("<Q", len(text)) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": b"", "short": b"\1\0", "a header longer than the file": struct.pack("<Q", 2**60) + b"{}",
    "no json": header(b"{...}"), "no table": header(b"[1]"), "deep": header(b"[" * 100_000),
    "cut off": header({"a": F32}, b"1234567"), "a byte too many": header({"a": F32}, b"123456789"),
    "wrong size": header({"a": F32 | {"shape": [3]}}, b"12345678"),
    "unknown dtype": header({"a": F32 | {"dtype": "X"}}, b"12345678"),
    "a hole": header({"a": F32 | {"data_offsets": [8, 16]}}, b"1" * 16),
    "overlap": header({"a": F32, "b": F32}, b"1" * 8), "negative": header({"a": F32 | {"shape": [-2]}}, b"1" * 8),
    "a float": header({"a": F32 | {"shape": [2.0]}}, b"1" * 8), "text": header({"a": "F32"}, b"1" * 8),
    "twice": header(b'{"a":' + json.dumps(F32).encode() + b',"a":' + json.dumps(F32).encode() + b"}", b"1" * 8),
    "backwards": header({"a": F32 | {"data_offsets": [8, 0]}}, b"1" * 8), "utf": header(b'{"\xff": 1}'),
}  # fmt: skip


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_damaged_file_is_named(content, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    refused(lambda: entries(file), str(file))


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/out.safetensors", "a/b.safetensors", "..\\x.safetensors", "x"]
)
def test_an_index_does_not_lead_out_of_its_folder(name, tmp_path):
    export(born(LLAMA), LLAMA, tmp_path / "model", max_file_bytes=3000)
    index = tmp_path / "model" / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(said))
    refused(lambda: load(tmp_path / "model"), "its own folder", ascii(name)[1:-1])


def test_an_index_and_its_files_agree(tmp_path):
    export(born(LLAMA), LLAMA, tmp_path, max_file_bytes=3000)
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    names = sorted(set(whole["weight_map"].values()))
    for change, word in (
        (lambda where: where.update({"lm_head.weight": names[0]}), "the index says in"),
        (lambda where: where.pop("lm_head.weight"), "the index says nowhere"),
        (lambda where: where.update({"more": names[0]}), "more is not in"),
        (lambda where: where.update({"more": "none.safetensors"}), "No such file"),
        (lambda where: where.update({"more": 5}), "weight_map"),
        (lambda where: where.clear(), "weight_map"),
    ):
        said = json.loads(json.dumps(whole))
        change(said["weight_map"])
        index.write_text(json.dumps(said))
        refused(lambda: load(tmp_path), word)


@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from(sorted(DTYPES)), min_size=6, max_size=6),
    most=st.integers(1, 100),
    seed=st.integers(0, 99),
)
def test_any_tensors_are_read_as_they_were_written(shapes, dtypes, most, seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(seed)
    held = {
        f"t{i}": rng.integers(0, 2, shape).astype(DTYPES[dtype])
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    made = [TensorSource(name, value.dtype, value.shape, lambda value=value: value) for name, value in held.items()]
    found = {}
    for file in write(folder, made, max_file_bytes=most):
        if file.suffix == ".safetensors":
            found |= entries(file)
    assert found.keys() == held.keys()
    for name, value in held.items():
        assert found[name].view().tobytes() == value.tobytes()
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)


def test_the_package_safetensors_reads_and_writes_the_same_files(tmp_path):
    theirs = pytest.importorskip("safetensors.numpy", reason="the package safetensors is not installed")
    held = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((), np.int64), "c": np.ones(3, np.float16)}
    theirs.save_file(held, tmp_path / "theirs.safetensors")
    found = entries(tmp_path / "theirs.safetensors")
    assert {name: entry.view().tolist() for name, entry in found.items()} == {k: v.tolist() for k, v in held.items()}
    write(tmp_path, [TensorSource(k, v.dtype, v.shape, lambda v=v: v) for k, v in held.items()], max_file_bytes=100)
    back = theirs.load_file(tmp_path / "model.safetensors")
    assert all((back[name] == value).all() and back[name].dtype == value.dtype for name, value in held.items())
