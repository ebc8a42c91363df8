"""Converts a config.json of Hugging Face into the settings of a decoder, and back.

Every key is known here: it is a setting, it has one value that the decoder can do, or it changes no logit. Any other
is refused by name: a model that is read is the model that was written.

Keys and their defaults: LlamaConfig and GPT2Config of transformers, 4.0 to 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import JaxparError, Problem, nearest, refuse
from jaxpar.models.settings.decoder import DecoderSettings

RULE = "a config.json says what the decoder of jaxpar can be"
# what changes no logit: bookkeeping, tokens of the tokenizer, first values, how text is generated or a model is trained
SILENT = {
    "_name_or_path", "_attn_implementation", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id",
    "dtype", "early_stopping", "embd_pdrop", "eos_token_id", "gradient_checkpointing", "id2label", "initializer_range",
    "label2id", "max_length", "model_type", "n_ctx", "output_attentions", "output_hidden_states", "pad_token_id",
    "predict_special_tokens", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
    # as transformers 4 writes a whole config, and what published folders have besides
    "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "is_decoder", "is_llama_config",
    "length_penalty", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "prefix", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "top_k", "top_p",
    "torchscript", "transformers.js_config", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16",
}  # fmt: skip
# what has a value, or its absence, that the decoder can do, and no other
ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,), "chunk_size_feed_forward": (0,), "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None), "per_layer_config": (None,), "rope_interleaved": (False,),
}  # fmt: skip
STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model, in both words.

    Attributes:
      architecture: The name of its class in transformers.
      fixed: Settings that make a decoder this kind.
      keys: Setting to their key; those without a default have to be there.
      defaults: Their key to its value where it is left out.
      only: Their key to the values that the decoder can do; the first is written.
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


def settings_of(config: Mapping[str, Any]) -> tuple[str, DecoderSettings]:
    """Returns the family and the settings that a config.json says.

    Raises:
      JaxparError: With every key that the decoder does not know, or cannot do.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise refuse(f"model_type = {kind!r:.60}", rule=RULE, fix=f"a model of the kind {' or '.join(FAMILIES)}")
    family = FAMILIES[kind]
    config = _flat_rope(config) if kind == "llama" else config
    problems = [*_wrong_class(config, family), *_unknown(config, family)]
    values: dict[str, Any] = {}
    for ours, key in family.keys.items():
        wanted = type(getattr(DecoderSettings, ours))
        value = family.defaults.get(key) if config.get(key) is None else config[key]
        if type(value) is int and wanted is float and abs(value) < 2**53:
            value = float(value)
        if type(value) is not wanted:
            got = f"{key} = {value!r:.60}" if key in config else f"{key} is missing"
            problems.append(Problem(got, RULE, f"{key} is of type {wanted.__name__}"))
        values[ours] = value
    if problems:
        raise JaxparError(*problems)
    if scaling := config.get("rope_scaling"):
        values["rope_stretch"] = _stretch(scaling)
    made = DecoderSettings(**{**family.fixed, **values})
    if problems := _apart(kind, config, made):
        raise JaxparError(*problems)
    return kind, made


def _apart(kind: str, config: Mapping[str, Any], made: DecoderSettings) -> list[Problem]:
    """Returns what keys say that the decoder says with another key already, if it is something else."""
    told = {"head_dim": made.dim // made.heads, "mlp_bias": made.use_bias} if kind == "llama" else {"n_ctx": made.seq}
    why = {
        "head_dim": "the heads of the decoder share its width: head_dim is dim / heads",
        "mlp_bias": "every matrix of the decoder has a bias, or none: mlp_bias is attention_bias",
        "n_ctx": "n_ctx is n_positions",
    }
    absent = {"mlp_bias": False}
    return [
        Problem(f"{key} = {value!r:.60}", why[key], f"a model with {key} = {told[key]}")
        for key in told
        if (value := config.get(key, absent.get(key))) is not None and value != told[key]
    ]


def config_of(settings: DecoderSettings, dtype: str) -> tuple[str, dict[str, Any]]:
    """Returns the family of a decoder and its config.json.

    Args:
      settings: The decoder's.
      dtype: Dtype of its tensors, such as float32.

    Raises:
      JaxparError: If it is of no family: which settings keep it from each.
    """
    apart = {
        kind: [key for key, value in family.fixed.items() if getattr(settings, key) != value]
        + ["kv_heads"] * (kind == "gpt2" and settings.kv_heads not in (0, settings.heads))
        for kind, family in FAMILIES.items()
    }
    kind = min(apart, key=lambda kind: len(apart[kind]))
    if apart[kind]:
        has = {key: FAMILIES[kind].fixed.get(key, settings.heads) for key in apart[kind]}
        raise refuse(
            "a decoder with " + ", ".join(f"{key} = {getattr(settings, key)!r}" for key in has),
            rule=f"what is exported is a model that Hugging Face has: {' or '.join(FAMILIES)}",
            fix=f"{kind} has " + ", ".join(f"{key} = {value!r}" for key, value in has.items()),
        )
    family = FAMILIES[kind]
    values = {key: getattr(settings, ours) for ours, key in family.keys.items()}
    config = {"model_type": kind, "architectures": [family.architecture], "torch_dtype": dtype} | values
    config |= {key: some[0] for key, some in family.only.items()}
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
    """Returns a config with `rope_theta` and `rope_scaling` as transformers 4 writes them; 5 has them in one table."""
    flat = dict(config)
    table = flat.pop("rope_parameters", None)
    if table is None:
        return flat
    rest = dict(table) if isinstance(table, dict) else {"rope_parameters": table}
    theta = rest.pop("rope_theta", flat.get("rope_theta", 10_000.0))
    if flat.setdefault("rope_theta", theta) != theta:
        raise refuse(
            f"rope_theta = {flat['rope_theta']!r:.40}, and {theta!r:.40} in rope_parameters",
            rule=RULE,
            fix="one of them",
        )
    if rest.get("rope_type") == "default":
        del rest["rope_type"]
    if rest and (flat.get("rope_scaling") or rest) != rest:
        got = f"rope_scaling = {flat['rope_scaling']!r:.80}, and {rest!r:.80} in rope_parameters"
        raise refuse(got, rule=RULE, fix="one of them")
    return flat | ({"rope_scaling": rest} if rest else {})


def _stretch(scaling: Any) -> tuple[float, ...]:
    """Returns the settings of Llama 3.1's rotary frequencies; the decoder has no other way to stretch them."""
    told = dict(scaling) if isinstance(scaling, Mapping) else {}
    if told.pop("rope_type", None) != "llama3" or told.keys() != set(STRETCH):
        raise refuse(
            f"rope_scaling = {scaling!r:.100}",
            rule=f"rotary frequencies are plain, or stretched as in Llama 3.1: llama3 with {', '.join(STRETCH)}",
            fix="another model",
        )
    if not all(type(value) in (int, float) and 0 < value < 1e9 for value in told.values()):
        raise refuse(
            f"rope_scaling = {scaling!r:.100}", rule="the numbers of rope_scaling are positive", fix="fetch it again"
        )
    return tuple(float(told[key]) for key in STRETCH)


def _wrong_class(config: Mapping[str, Any], family: Family) -> list[Problem]:
    named = config.get("architectures")
    if named in (None, [family.architecture]):
        return []
    return [Problem(f"architectures = {named!r:.80}", f"the decoder is a {family.architecture}", "another model")]


def _unknown(config: Mapping[str, Any], family: Family) -> list[Problem]:
    """Returns the keys that nobody reads, and those with a value that the decoder cannot do."""
    only = ONLY | dict(family.only)
    read = {*family.keys.values()}
    if family is FAMILIES["llama"]:
        read |= {"head_dim", "mlp_bias", "rope_scaling"}
    problems = []
    for key, value in config.items():
        if key in only and not any(type(value) is type(one) and value == one for one in only[key]):
            able = " or ".join(map(repr, only[key]))
            problems.append(Problem(f"{key} = {value!r:.100}", f"the decoder can do {key} = {able}", "another model"))
        elif key not in SILENT | read | only.keys():
            problems.append(
                Problem(f"{key} = {value!r:.100}", "every key of config.json that changes the model is supported",
                        f"another model, or a line less if it changes no logit; {nearest(key, read)}")
            )  # fmt: skip
    return problems
