"""Families of Hugging Face's decoders, each as rows: settings, keys of config.json, and tensors.

To add a family: its settings here, its tensors in `param_mapping.py`.
Keys and their defaults: the configuration classes of transformers, 4.0 to 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import refuse
from jaxpar.models.huggingface.conversions import (
    ATTENTION_BIAS,
    ATTENTION_SCALE,
    BIASES,
    FULL,
    QUERY_SCALE,
    RULE,
    SLIDING,
    WIDTH_SCALE,
    Config,
    Conversion,
    activation,
    alternate_windows,
    head_dim,
    integer,
    layer_types,
    number,
    read_biases,
    scale,
    shortest_period,
    softcap,
    switched_windows,
    uniform_window,
    windows,
    write_layer_types,
)
from jaxpar.models.huggingface.rope_conversions import LONGROPE, ROPE, rotary_share
from jaxpar.models.settings.decoder import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model, in jaxpar's and in Hugging Face's terms.

    Attributes:
      architecture: The name of its class in transformers.
      prefix: First word of its tensors' names, which a model saved without its head lacks.
      fixed: Settings that all decoders of this kind share.
      keys: jaxpar's setting to Hugging Face's key; keys without a default are required.
      defaults: Hugging Face's key to its value if it is missing.
      conversions: Keys and settings that are no pairs of equal values.
      only: Hugging Face's key to the values that the decoder supports; `make_config` writes the first.
    """

    architecture: str
    prefix: str = "model."
    fixed: Mapping[str, Any]
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    conversions: tuple[Conversion, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


KEYS = {
    "vocab": "vocab_size", "seq": "max_position_embeddings", "layers": "num_hidden_layers", "dim": "hidden_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings", "rope_base": "rope_theta",
}  # fmt: skip
DEFAULTS = {
    "num_key_value_heads": 0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA = {"position": "rotary", "norm": "rms", "gated": True}
GEMMA = {"position": "rotary", "norm": "zero_centered_rms", "norm_position": "both", "gated": True}


# Gemma 3 has other rotary frequencies in its windows, and transformers 5 nests them by kind of layer.


def _gemma3_types(config: Config) -> list[str]:
    pattern = integer(config, "sliding_window_pattern") or integer(config, "_sliding_window_pattern") or 6
    count, types = config.get("num_hidden_layers"), config.get("layer_types")
    count = count if type(count) is int and 0 < count < 10_000 else 0
    return types if isinstance(types, list) else [SLIDING if (i + 1) % pattern else FULL for i in range(count)]


def _read_gemma3_windows(config: Config) -> dict[str, Any]:
    types = layer_types(config, _gemma3_types(config).__getitem__)
    size = integer(config, "sliding_window") if "sliding_window" in config else 4096
    return {"windows": windows(types, size)}


GEMMA3_WINDOWS = Conversion(("sliding_window", "layer_types"), _read_gemma3_windows, write_layer_types)


def _read_gemma3_rope(config: Config) -> dict[str, Any]:
    whole, scaling = number(config, "rope_theta", 1e6), config.get("rope_scaling")
    local, factor = number(config, "rope_local_base_freq", 10_000.0), 1.0
    if scaling:
        rope = dict(scaling) if isinstance(scaling, Mapping) else {}
        if rope.get("rope_type", rope.get("type")) != "linear" or rope.keys() - {"rope_type", "type", "factor"}:
            raise refuse(f"rope_scaling = {scaling!r:.100}", rule="rotary frequencies of Gemma 3 are plain or linear",
                         fix="another model")  # fmt: skip
        factor = number(rope, "factor", 1.0)
    types = _gemma3_types(config)
    bases = shortest_period([local if kind == SLIDING else whole for kind in types])
    factors = shortest_period([1.0 if kind == SLIDING else factor for kind in types])
    return {"rope_base": whole, "rope_bases": bases, "rope_factors": () if factor == 1 else factors}


def _write_gemma3_rope(settings: DecoderConfig) -> dict[str, Any]:
    kinds = settings.layer_attention
    local = next((base for window, base, _ in kinds if window), 10_000.0)
    whole = next((base for window, base, _ in kinds if not window), settings.rope_base)
    factor = next((factor for window, _, factor in kinds if not window), 1.0)
    scaling = None if factor == 1 else {"rope_type": "linear", "factor": factor}
    nested = {
        SLIDING: {"rope_type": "default", "rope_theta": local},
        FULL: {**(scaling or {"rope_type": "default"}), "rope_theta": whole},
    }
    keys = {"rope_theta": whole, "rope_local_base_freq": local, "rope_scaling": scaling}
    return keys | {"rope_parameters": nested}


GEMMA3_ROPE = Conversion(
    ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern", "_sliding_window_pattern"),
    _read_gemma3_rope,
    _write_gemma3_rope,
)


# GPT-NeoX's feed-forward always has biases.

NEOX_BIASES = Conversion(
    ("attention_bias",),
    lambda config: {"biases": (*read_biases({"attention_bias": True, **config})["biases"], "mlp")},
    lambda settings: {"attention_bias": "qkv" in settings.biased_parts},
)


# SmolLM3 has no positions in every fourth layer; the layers without them have the window, if there is one.


def _rotary_layers(config: Config) -> list[int]:
    """1 for a layer that has rotary positions, else 0, for each layer."""
    count, layers = config.get("num_hidden_layers"), config.get("no_rope_layers")
    count = count if type(count) is int and 0 < count < 10_000 else 0
    if layers is None:
        interval = integer(config, "no_rope_layer_interval") or 4
        layers = [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(layers, list) or len(layers) != count or not all(value in (0, 1) for value in layers):
        raise refuse(f"no_rope_layers = {layers!r:.100} for {count} layers", rule=RULE,
                     fix="a list of 0 and 1, one for each layer")  # fmt: skip
    return layers


def _read_no_rope(config: Config) -> dict[str, Any]:
    layers = _rotary_layers(config)
    base = number(config, "rope_theta", 2e6)
    return {"rope_bases": shortest_period([base if rotates else 0.0 for rotates in layers]) if 0 in layers else ()}


def _write_no_rope(settings: DecoderConfig) -> dict[str, Any]:
    kinds = settings.layer_attention
    return {"no_rope_layers": [int(kinds[i % len(kinds)][1] > 0) for i in range(settings.layers)]}


NO_ROPE = Conversion(("no_rope_layers", "no_rope_layer_interval"), _read_no_rope, _write_no_rope)


SMOLLM3_WINDOWS = switched_windows(None, lambda config: lambda i: not _rotary_layers(config)[i])


# Mixtures: a decoder as read has no capacity, as in transformers.


def _experts(count: str, hidden: str, normalize: str | None, *, defaults: Mapping[str, Any]) -> Conversion:
    def read(config: Config) -> dict[str, Any]:
        config = {**defaults} | {key: value for key, value in config.items() if value is not None}
        values: dict[str, Any] = {"count": integer(config, count), "per_token": integer(config, "num_experts_per_tok")}
        values |= {"hidden": integer(config, hidden), "capacity": 0.0}
        if normalize is not None and type(config[normalize]) is not bool:
            raise refuse(f"{normalize} = {config[normalize]!r:.60}", rule=RULE, fix="true or false")
        return {"experts": values | ({} if normalize is None else {"normalize": config[normalize]})}

    def write(settings: DecoderConfig) -> dict[str, Any]:
        e = settings.experts
        keys: dict[str, Any] = {count: e.count, "num_experts_per_tok": e.per_token, hidden: e.hidden or settings.width}
        return keys | ({} if normalize is None else {normalize: e.normalize})

    keys = tuple(key for key in (count, "num_experts_per_tok", hidden, normalize) if key is not None)
    return Conversion(keys, read, write)


MIXTRAL_EXPERTS = _experts(
    "num_local_experts", "intermediate_size", None, defaults={"num_local_experts": 8, "num_experts_per_tok": 2}
)
QWEN3_EXPERTS = _experts(
    "num_experts", "moe_intermediate_size", "norm_topk_prob",
    defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
)  # fmt: skip
OLMOE_EXPERTS = _experts(
    "num_experts", "intermediate_size", "norm_topk_prob",
    defaults={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
)  # fmt: skip
# the keys of a window that use_sliding_window = false turns off
UNUSED_WINDOWS = Conversion(
    ("sliding_window", "max_window_layers"), lambda config: {}, lambda settings: {"sliding_window": None}
)
# StarCoder 2 has biases on every matrix or on none; transformers does not read the other keys of its folders
ALL_BIASES = Conversion(
    ("use_bias",),
    lambda config: {"use_bias": config.get("use_bias", True)},
    lambda settings: {"use_bias": len(settings.biased_parts) == 3},
)
LEGACY_KEYS = Conversion(
    (
        "activation_function", "attention_softmax_in_fp32", "embedding_dropout", "layer_norm_epsilon", "mlp_type",
        "norm_type", "residual_dropout", "scale_attention_softmax_in_fp32", "scale_attn_weights",
    ),
    lambda config: {},
    lambda settings: {},
)  # fmt: skip
ACT = activation("hidden_act", default="silu")
GEMMA_ACT = activation("hidden_activation", "hidden_act", "sliding_window_size", default="gelu_pytorch_tanh")


# Gemma was trained with gelu by tanh, whatever the `hidden_act` of its first folders says: most versions of
# transformers read `hidden_activation` alone, and null as tanh, but 4.57 reads `hidden_act`. Both are written. Beside
# `hidden_activation`, the `gelu` of the first folders says nothing.


def _read_gemma1_activation(config: Config) -> dict[str, Any]:
    new, old = GEMMA_ACT.read(config), ACT.read({"hidden_act": "gelu_pytorch_tanh", **config})
    legacy = config.get("hidden_act") == "gelu"
    if config.get("hidden_activation") is not None and "hidden_act" in config and not legacy and new != old:
        got = f"hidden_activation = {config['hidden_activation']!r:.40}, hidden_act = {config['hidden_act']!r:.40}"
        raise refuse(got, rule=RULE, fix="one activation in both")
    return new


GEMMA1_ACT = Conversion(
    GEMMA_ACT.keys, _read_gemma1_activation, lambda settings: GEMMA_ACT.write(settings) | ACT.write(settings)
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM", fixed=LLAMA, keys=KEYS, defaults=DEFAULTS,
        conversions=(ACT, BIASES, head_dim(), ROPE),
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        fixed={"position": "learned", "norm": "layer", "gated": False, "use_bias": True},
        keys={
            "vocab": "vocab_size", "seq": "n_positions", "layers": "n_layer", "dim": "n_embd", "heads": "n_head",
            "hidden": "n_inner", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
        },
        defaults={"n_inner": 0, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        conversions=(activation("activation_function", default="gelu_new"),),
        only={
            "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
        },
    ),
    "mistral": Family(
        architecture="MistralForCausalLM", fixed=LLAMA, keys=KEYS,
        defaults=DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
        conversions=(ACT, head_dim(), uniform_window(4096), ROPE),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", fixed=LLAMA | {"biases": ("qkv",)}, keys=KEYS,
        defaults=DEFAULTS | {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
        conversions=(ACT, switched_windows(4096), ROPE),
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", fixed=LLAMA | {"qk_norm": "head"}, keys=KEYS,
        defaults=DEFAULTS | {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
        conversions=(ACT, ATTENTION_BIAS, head_dim(128), switched_windows(4096), ROPE),
    ),
    "phi": Family(
        architecture="PhiForCausalLM",
        fixed={
            "position": "rotary", "norm": "layer", "gated": False, "use_bias": True, "parallel_residual": True,
            "shared_norm": True, "head_bias": True,
        },
        keys=KEYS | {"norm_eps": "layer_norm_eps"},
        defaults=DEFAULTS | {"layer_norm_eps": 1e-5},
        conversions=(activation("hidden_act", default="gelu_new"), ROPE, rotary_share("partial_rotary_factor", 0.5)),
        only={"qk_layernorm": (False,)},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM", fixed=LLAMA, keys=KEYS,
        defaults=DEFAULTS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        conversions=(ACT, uniform_window(None), LONGROPE, rotary_share("partial_rotary_factor", 1.0)),
        only={"attention_bias": (False,)},
    ),
    "olmo": Family(
        architecture="OlmoForCausalLM", fixed=LLAMA | {"norm": "nonparametric_layer", "norm_eps": 1e-5},
        keys={key: value for key, value in KEYS.items() if key != "norm_eps"}, defaults=DEFAULTS,
        conversions=(ACT, ATTENTION_BIAS), only={"clip_qkv": (None,), "rope_scaling": (None,)},
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM", fixed=LLAMA | {"norm_position": "post", "qk_norm": "all_heads"}, keys=KEYS,
        defaults=DEFAULTS | {"rms_norm_eps": 1e-5}, conversions=(ACT, ATTENTION_BIAS, ROPE),
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM", fixed=LLAMA, keys=KEYS,
        defaults=DEFAULTS | {
            "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6, "max_position_embeddings": 32_768,
        },
        conversions=(ACT, BIASES, NO_ROPE, SMOLLM3_WINDOWS, ROPE),
    ),
    "granite": Family(
        architecture="GraniteForCausalLM", fixed=LLAMA, keys=KEYS, defaults=DEFAULTS,
        conversions=(
            ACT, BIASES, ROPE, scale("embed_scale", "embedding_multiplier"), ATTENTION_SCALE,
            scale("residual_scale", "residual_multiplier"),
            scale("logits_scale", "logits_scaling", inverse=True),
        ),
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM", fixed=GEMMA | {"norm_position": "pre"}, keys=KEYS,
        defaults=DEFAULTS | {
            "num_key_value_heads": 16, "tie_word_embeddings": True, "max_position_embeddings": 8192,
        },
        conversions=(GEMMA1_ACT, ATTENTION_BIAS, head_dim(256), WIDTH_SCALE, ROPE),
        only={"use_bidirectional_attention": (None, False)},
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM", fixed=GEMMA, keys=KEYS,
        defaults=DEFAULTS | {"num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 8192},
        conversions=(
            GEMMA_ACT, ATTENTION_BIAS, head_dim(256), QUERY_SCALE, WIDTH_SCALE, ROPE,
            softcap("attention_softcap", "attn_logit_softcapping", 50.0),
            softcap("logits_softcap", "final_logit_softcapping", 30.0),
            alternate_windows(4096, lambda i: FULL if i % 2 else SLIDING),
        ),
        only={"use_bidirectional_attention": (None, False)},
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM", fixed=GEMMA | {"qk_norm": "head"},
        keys={key: value for key, value in KEYS.items() if key != "rope_base"},
        defaults=DEFAULTS | {"num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 131_072},
        conversions=(
            GEMMA_ACT, ATTENTION_BIAS, head_dim(256), QUERY_SCALE, WIDTH_SCALE, GEMMA3_ROPE,
            softcap("logits_softcap", "final_logit_softcapping", None), GEMMA3_WINDOWS,
        ),
        only={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        prefix="gpt_neox.",
        fixed={"position": "rotary", "norm": "layer", "gated": False},
        keys={
            "vocab": "vocab_size", "seq": "max_position_embeddings", "layers": "num_hidden_layers",
            "dim": "hidden_size", "heads": "num_attention_heads", "hidden": "intermediate_size",
            "norm_eps": "layer_norm_eps", "tied": "tie_word_embeddings", "rope_base": "rotary_emb_base",
            "parallel_residual": "use_parallel_residual",
        },
        defaults={
            "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
            "rotary_emb_base": 10_000.0, "use_parallel_residual": True,
        },
        conversions=(activation("hidden_act", default="gelu"), NEOX_BIASES, rotary_share("rotary_pct", 0.25)),
        only={"rope_scaling": (None,)},
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM", fixed={"position": "rotary", "norm": "layer", "gated": False},
        keys=KEYS | {"norm_eps": "norm_epsilon"},
        defaults=DEFAULTS | {
            "num_key_value_heads": 2, "norm_epsilon": 1e-5, "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
        },
        conversions=(
            activation("hidden_act", default="gelu_pytorch_tanh"), ALL_BIASES, LEGACY_KEYS, uniform_window(None), ROPE,
        ),
        only={"use_bias": (True, False)},
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM", fixed=LLAMA, keys=KEYS,
        defaults=DEFAULTS | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131_072,
        },
        conversions=(ACT, head_dim(), uniform_window(None), ROPE, MIXTRAL_EXPERTS),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM", fixed=LLAMA | {"qk_norm": "head"}, keys=KEYS,
        defaults=DEFAULTS | {"num_key_value_heads": 4, "max_position_embeddings": 32_768},
        conversions=(ACT, ATTENTION_BIAS, head_dim(), UNUSED_WINDOWS, ROPE, QWEN3_EXPERTS),
        only={"use_sliding_window": (False,), "mlp_only_layers": ([], None), "decoder_sparse_step": (1,)},
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM", fixed=LLAMA | {"qk_norm": "all_heads"}, keys=KEYS,
        defaults=DEFAULTS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        conversions=(ACT, ATTENTION_BIAS, ROPE, OLMOE_EXPERTS),
        only={"clip_qkv": (None,)},
    ),
}  # fmt: skip
