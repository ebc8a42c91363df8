"""Converts a config.json of Hugging Face into the settings of a decoder, and back.

The table below lists every key: as a setting, with the values that the decoder supports, or as one that changes no
logit. Any other key is refused by name, so that the loaded model always computes what the original does.

Keys and their defaults: LlamaConfig and GPT2Config of transformers, 4.0 to 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.models.settings.decoder import DecoderConfig

RULE = "a config.json describes a model that jaxpar's decoder supports"
# keys that change no logit: bookkeeping, special tokens, initialization, how text is generated or a model is trained
SILENT = {
    "_name_or_path", "_attn_implementation", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id",
    "dtype", "early_stopping", "embd_pdrop", "eos_token_id", "gradient_checkpointing", "id2label", "initializer_range",
    "label2id", "max_length", "model_type", "n_ctx", "output_attentions", "output_hidden_states", "pad_token_id",
    "predict_special_tokens", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
    # from full configs that transformers 4 writes, and from published folders
    "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "is_decoder", "is_llama_config",
    "length_penalty", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "prefix", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "top_k", "top_p",
    "torchscript", "transformers.js_config", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16",
}  # fmt: skip
# keys of which the decoder supports only these values; leaving the key out is fine
ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,), "chunk_size_feed_forward": (0,), "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None), "per_layer_config": (None,), "rope_interleaved": (False,),
}  # fmt: skip
STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model, in jaxpar's and in Hugging Face's terms.

    Attributes:
      architecture: The name of its class in transformers.
      fixed: Settings that all decoders of this kind share.
      keys: jaxpar's setting to Hugging Face's key; keys without a default are required.
      defaults: Hugging Face's key to its value if it is missing.
      only: Hugging Face's key to the values that the decoder supports; `config_of` writes the first.
    """

    architecture: str
    fixed: Mapping[str, Any]
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]


FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        fixed={"position": "rotary", "norm": "rms", "gated": True},
        keys={
            "vocab": "vocab_size", "seq": "max_position_embeddings", "layers": "num_hidden_layers",
            "dim": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
            "hidden": "intermediate_size", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings",
            "use_bias": "attention_bias", "rope_base": "rope_theta",
        },
        defaults={
            "max_position_embeddings": 2048, "num_key_value_heads": 0, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "attention_bias": False, "rope_theta": 10_000.0,
        },
        only={"hidden_act": ("silu", "swish")},
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        fixed={"position": "learned", "norm": "layer", "gated": False, "use_bias": True},
        keys={
            "vocab": "vocab_size", "seq": "n_positions", "layers": "n_layer", "dim": "n_embd", "heads": "n_head",
            "hidden": "n_inner", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
        },
        defaults={"n_inner": 0, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,),
        },
    ),
}  # fmt: skip


def settings_of(config: Mapping[str, Any]) -> tuple[str, DecoderConfig]:
    """Reads the family and the settings from a config.json.

    Raises:
      JaxparError: If the decoder does not know or support a key; the message lists all of them.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise refuse(f"model_type = {kind!r:.60}", rule=RULE, fix=f"a model of the kind {' or '.join(FAMILIES)}")
    family = FAMILIES[kind]
    config = _flat_rope(config) if kind == "llama" else config
    problems = [*_wrong_class(config, family), *_unknown(config, family)]
    values: dict[str, Any] = {}
    for setting, key in family.keys.items():
        expected = type(getattr(DecoderConfig, setting))
        value = family.defaults.get(key) if config.get(key) is None else config[key]
        if type(value) is int and expected is float and abs(value) < 2**53:
            value = float(value)
        if type(value) is not expected:
            got = f"{key} = {value!r:.60}" if key in config else f"{key} is missing"
            problems.append(Problem(got, RULE, f"{key} is of type {expected.__name__}"))
        values[setting] = value
    if problems:
        raise JaxparError(*problems)
    if scaling := config.get("rope_scaling"):
        values["rope_stretch"] = _stretch(scaling)
    settings = DecoderConfig(**{**family.fixed, **values})
    if problems := _contradictions(kind, config, settings):
        raise JaxparError(*problems)
    return kind, settings


def _contradictions(kind: str, config: Mapping[str, Any], settings: DecoderConfig) -> list[Problem]:
    """Reports keys that contradict other keys, e.g. head_dim != dim / heads."""
    expected = (
        {"head_dim": settings.dim // settings.heads, "mlp_bias": settings.use_bias}
        if kind == "llama"
        else {"n_ctx": settings.seq}
    )
    reasons = {
        "head_dim": "the heads of the decoder share its width: head_dim is dim / heads",
        "mlp_bias": "every matrix of the decoder has a bias, or none: mlp_bias is attention_bias",
        "n_ctx": "n_ctx is n_positions",
    }
    absent = {"mlp_bias": False}
    return [
        Problem(f"{key} = {value!r:.60}", reasons[key], f"a model with {key} = {expected[key]}")
        for key in expected
        if (value := config.get(key, absent.get(key))) is not None and value != expected[key]
    ]


def config_of(settings: DecoderConfig, dtype: str) -> tuple[str, dict[str, Any]]:
    """Returns the family of a decoder and its config.json.

    Args:
      settings: Settings of the decoder.
      dtype: Dtype of its tensors, such as float32.

    Raises:
      JaxparError: If it belongs to no family; the message has the settings that differ from the nearest one.
    """
    if settings.experts.count:
        raise refuse(
            f"a decoder with experts.count = {settings.experts.count}",
            rule=f"export writes a model of dense layers: {' or '.join(FAMILIES)}",
            fix="experts.count = 0, or the checkpoint as it is",
        )
    mismatches = {
        kind: [key for key, value in family.fixed.items() if getattr(settings, key) != value]
        + ["kv_heads"] * (kind == "gpt2" and settings.kv_heads not in (0, settings.heads))
        for kind, family in FAMILIES.items()
    }
    kind = min(mismatches, key=lambda kind: len(mismatches[kind]))
    if mismatches[kind]:
        required = {key: FAMILIES[kind].fixed.get(key, settings.heads) for key in mismatches[kind]}
        raise refuse(
            "a decoder with " + ", ".join(f"{key} = {getattr(settings, key)!r}" for key in required),
            rule=f"export writes a model that Hugging Face supports: {' or '.join(FAMILIES)}",
            fix=f"{kind} has " + ", ".join(f"{key} = {value!r}" for key, value in required.items()),
        )
    family = FAMILIES[kind]
    values = {key: getattr(settings, setting) for setting, key in family.keys.items()}
    config = {"model_type": kind, "architectures": [family.architecture], "torch_dtype": dtype} | values
    config |= {key: values_allowed[0] for key, values_allowed in family.only.items()}
    if kind == "llama":
        config |= {
            "num_key_value_heads": settings.kv_heads or settings.heads, "intermediate_size": settings.width,
            "head_dim": settings.dim // settings.heads, "mlp_bias": settings.use_bias, "attention_dropout": 0.0,
        }  # fmt: skip
        scaling = None
        if settings.rope_stretch:
            stretch = [*settings.rope_stretch[:3], int(settings.rope_stretch[3])]
            scaling = {"rope_type": "llama3", **dict(zip(STRETCH, stretch, strict=True))}
        config["rope_scaling"] = scaling
        config["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": settings.rope_base}
    else:
        rate = settings.dropout
        config |= {"n_inner": settings.width, "embd_pdrop": rate, "resid_pdrop": rate, "attn_pdrop": 0.0}
    return kind, config


def _flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Moves transformers 5's `rope_parameters` table to transformers 4's `rope_theta` and `rope_scaling`."""
    flat = dict(config)
    table = flat.pop("rope_parameters", None)
    if table is None:
        return flat
    rope = dict(table) if isinstance(table, dict) else {"rope_parameters": table}
    theta = rope.pop("rope_theta", flat.get("rope_theta", 10_000.0))
    if flat.setdefault("rope_theta", theta) != theta:
        raise refuse(
            f"rope_theta = {flat['rope_theta']!r:.40}, and {theta!r:.40} in rope_parameters",
            rule=RULE,
            fix="one of them",
        )
    if rope.get("rope_type") == "default":
        del rope["rope_type"]
    if rope and (flat.get("rope_scaling") or rope) != rope:
        got = f"rope_scaling = {flat['rope_scaling']!r:.80}, and {rope!r:.80} in rope_parameters"
        raise refuse(got, rule=RULE, fix="one of them")
    return flat | ({"rope_scaling": rope} if rope else {})


def _stretch(scaling: object) -> tuple[float, ...]:
    """Returns the settings of Llama 3.1's rotary frequencies, the only scaling that the decoder supports."""
    rope = dict(scaling) if isinstance(scaling, Mapping) else {}
    if rope.pop("rope_type", None) != "llama3" or rope.keys() != set(STRETCH):
        raise refuse(
            f"rope_scaling = {scaling!r:.100}",
            rule=f"rotary frequencies are plain, or stretched as in Llama 3.1: llama3 with {', '.join(STRETCH)}",
            fix="another model",
        )
    if not all(type(value) in (int, float) and 0 < value < 1e9 for value in rope.values()):
        raise refuse(
            f"rope_scaling = {scaling!r:.100}", rule="the numbers of rope_scaling are positive", fix="fetch it again"
        )
    return tuple(float(rope[key]) for key in STRETCH)


def _wrong_class(config: Mapping[str, Any], family: Family) -> list[Problem]:
    names = config.get("architectures")
    if names in (None, [family.architecture]):
        return []
    return [Problem(f"architectures = {names!r:.80}", f"the decoder is a {family.architecture}", "another model")]


def _unknown(config: Mapping[str, Any], family: Family) -> list[Problem]:
    """Reports unknown keys, and keys with values that the decoder does not support."""
    limits = ONLY | dict(family.only)
    handled = {*family.keys.values()}
    if family is FAMILIES["llama"]:
        handled |= {"head_dim", "mlp_bias", "rope_scaling"}
    problems = []
    for key, value in config.items():
        if key in limits and not any(type(value) is type(choice) and value == choice for choice in limits[key]):
            values = " or ".join(map(repr, limits[key]))
            problems.append(
                Problem(f"{key} = {value!r:.100}", f"the decoder supports {key} = {values}", "another model")
            )
        elif key not in SILENT | handled | limits.keys():
            problems.append(
                Problem(f"{key} = {value!r:.100}", "every key of config.json that changes the model is supported",
                        f"another model, or delete the key if it changes no logit; {suggest(key, handled)}")
            )  # fmt: skip
    return problems
