"""Converts a config.json of Hugging Face into the settings of a decoder, and back.

Every key is a setting of its family (`families.py`), one of which the decoder supports some values, or one that changes
no logit. Any other key is refused by name, so that the loaded model always computes what the original does.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.models.huggingface.conversions import FULL, RULE, SLIDING
from jaxpar.models.huggingface.families import FAMILIES, Family
from jaxpar.models.huggingface.rope_conversions import LONGROPE_NAMES, ORIGINAL
from jaxpar.models.settings.decoder import DecoderConfig

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
    "attention_probs_dropout_prob", "hidden_dropout_prob", "auto_map", "cache_implementation", "classifier_dropout",
    "hidden_dropout", "original_max_position_embeddings",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "torchscript", "transformers.js_config", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16",
}  # fmt: skip
# keys of which the decoder supports only these values; leaving the key out is fine
ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,), "chunk_size_feed_forward": (0,), "is_encoder_decoder": (False,),
    "per_layer_config": (None,), "pruned_heads": ({}, None), "rope_interleaved": (False,), "use_mrope": (False,),
}  # fmt: skip
# values of keys of other families with which they change no logit of a family that does not read them
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "mlp_bias": (False,), "partial_rotary_factor": (1, 1.0), "use_sliding_window": (False,),
}  # fmt: skip
MOST_LAYERS = 4096  # as many are compared
# settings that change no logit: how a decoder is trained and compiled
FREE = ("dropout", "scan", "padded_vocab")
FREE_OF_EXPERTS = (
    "dispatch", "capacity", "imbalance", "buffers", "overflow", "balance", "router_z", "balance_rate",
)  # fmt: skip


def read_settings(config: Mapping[str, Any]) -> tuple[str, DecoderConfig]:
    """Reads the family and the settings from a config.json.

    Raises:
      JaxparError: If the decoder does not know or support a key; the message lists all of them.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        fix = f"a model of the kind {', '.join(FAMILIES)}; or a Flax model of your own, with checkpoint.rules"
        raise refuse(f"model_type = {kind!r:.60}", rule=RULE, fix=fix)
    family = FAMILIES[kind]
    config = _flatten_rope(config) if family.fixed["position"] == "rotary" else config
    problems = [*_class_problems(config, family), *_key_problems(config, family)]
    values: dict[str, Any] = {}
    for setting, key in family.keys.items():
        expected = type(getattr(DecoderConfig, setting))
        # transformers reads null as a head of keys and values for each query head, whatever the family's default
        default = 0 if setting == "kv_heads" and key in config else family.defaults.get(key)
        value = default if config.get(key) is None else config[key]
        if type(value) is int and expected is float and abs(value) < 2**53:
            value = float(value)
        if type(value) is not expected:
            got = f"{key} = {value!r:.60}" if key in config else f"{key} is missing"
            problems.append(Problem(got, RULE, f"{key} is of type {expected.__name__}"))
        values[setting] = value
    for conversion in family.conversions:
        try:
            values |= conversion.read(config)
        except JaxparError as error:
            problems += error.problems
    if problems:
        raise JaxparError(*problems)
    settings = _shorten(DecoderConfig(**{**family.fixed, **values}))
    if config.get("n_ctx", settings.seq) != settings.seq:
        raise refuse(f"n_ctx = {config['n_ctx']!r:.60}", rule="n_ctx is n_positions",
                     fix=f"a model with n_ctx = {settings.seq}")  # fmt: skip
    return kind, settings


def _shorten(settings: DecoderConfig) -> DecoderConfig:
    """Returns equal settings with defaults in place of the numbers that they stand for."""
    plain = DecoderConfig(gated=settings.gated).activation_name
    changes: dict[str, Any] = {}
    if settings.head_dim * settings.heads == settings.dim:
        changes["head_dim"] = 0
    if settings.activation == plain:
        changes["activation"] = ""
    if settings.attention_scale == settings.head_width**-0.5:
        changes["attention_scale"] = 0.0
    if {*settings.biased_parts} == {"qkv", "out", "mlp"}:
        changes |= {"biases": (), "use_bias": True}
    return dataclasses.replace(settings, **changes)


def differences(first: DecoderConfig, second: DecoderConfig) -> list[str]:
    """Returns the settings in which two decoders differ in effect: a 0 stands for its default number."""
    mine, theirs = _resolve(first), _resolve(second)
    keys = [key for key in mine if mine[key] != theirs[key]]
    single = not (first.rope_bases or second.rope_bases)
    names = {"rope_bases": "rope_base"} if single else {}
    names |= {"biases": "use_bias"} if first.use_bias or second.use_bias else {}
    return [names.get(key, key) for key in keys]


def _resolve(settings: DecoderConfig) -> dict[str, Any]:
    """Returns settings without defaults that other settings imply, and without those that change no logit."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    kinds = settings.layer_attention
    rotary = settings.position == "rotary"
    yarn = settings.rope_yarn
    if yarn.factor:
        values["rope_yarn"] = dataclasses.replace(yarn, attention_factor=yarn.magnitude)
    if (longrope := settings.longrope).seq:
        values["longrope"] = dataclasses.replace(longrope, attention_factor=longrope.magnitude(settings.seq))
    values |= {"kv_heads": settings.kv_heads or settings.heads, "head_dim": settings.head_width}
    values |= {
        "hidden": settings.width,
        "activation": settings.activation_name,
        "use_bias": len(settings.biased_parts) == 3,
    }
    values |= {"biases": {*settings.biased_parts}, "rope_stretch": tuple(settings.rope_stretch) if rotary else ()}
    values |= {"attention_scale": settings.attention_scale or settings.head_width**-0.5}
    for place, key in enumerate(("windows", "rope_bases", "rope_factors")):
        values[key] = [kinds[i % len(kinds)][place] for i in range(min(settings.layers, MOST_LAYERS))]
    if not rotary:
        values |= dict.fromkeys(("rope_bases", "rope_factors", "rope_share", "rope_yarn", "longrope"))
    else:
        values["rope_factors"] = [
            factor if base else 1.0 for base, factor in zip(values["rope_bases"], values["rope_factors"], strict=True)
        ]
    experts = {field.name: getattr(settings.experts, field.name) for field in dataclasses.fields(settings.experts)}
    experts["hidden"] = settings.experts.hidden or settings.width
    if settings.experts.count and not settings.has_dense_layers:
        values["hidden"] = experts["hidden"]  # no layer has a dense one
    values["experts"] = {key: value for key, value in experts.items() if key not in FREE_OF_EXPERTS}
    if not settings.experts.count:
        values["experts"] = {"count": 0}
    values.pop("rope_base")  # in rope_bases
    return {key: value for key, value in values.items() if key not in FREE}


def make_config(settings: DecoderConfig, dtype: str, *, origin: str = "") -> tuple[str, dict[str, Any]]:
    """Returns the family of a decoder and its config.json.

    A config is right if reading it gives the settings; of several such families it is that of `origin`, or the first.

    Args:
      settings: Settings of the decoder.
      dtype: Dtype of its tensors, such as float32.
      origin: Family of the model that it was loaded from.

    Raises:
      JaxparError: If it belongs to no family; the message has the settings that differ from the nearest one.
    """
    if settings.experts.balance_rate:
        raise refuse(
            f"experts.balance_rate = {settings.experts.balance_rate}",
            rule="no family of mixtures that export writes adds a bias to the scores of its router",
            fix="the checkpoint as it is",
        )
    changes: dict[str, list[str]] = {}
    read_back: dict[str, DecoderConfig] = {}
    for kind in sorted(FAMILIES, key=lambda kind: kind != origin):
        config = _write(kind, settings, dtype)
        try:
            _, read_back[kind] = read_settings(config)
        except JaxparError:  # a mixture without experts, say: no config of this family
            continue
        changes[kind] = differences(settings, read_back[kind])
        if not changes[kind]:
            return kind, config
    kind = min(changes, key=lambda kind: len(changes[kind]))
    nearest = read_back[kind]
    raise refuse(
        "a decoder with " + ", ".join(f"{key} = {getattr(settings, key)!r}" for key in changes[kind]),
        rule=f"export writes a model that Hugging Face supports: {', '.join(FAMILIES)}",
        fix=f"{kind} has "
        + ", ".join(f"{key} = {_resolve(nearest).get(key, getattr(nearest, key))!r}" for key in changes[kind]),
    )


def _write(kind: str, settings: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Returns the config.json of a decoder as one of this family, which may not express all of its settings."""
    family, rate = FAMILIES[kind], settings.dropout
    values = {key: getattr(settings, setting) for setting, key in family.keys.items()}
    implied = {"kv_heads": settings.kv_heads or settings.heads, "hidden": settings.width}
    values |= {key: implied[setting] for setting, key in family.keys.items() if setting in implied}
    config = {"model_type": kind, "architectures": [family.architecture], "torch_dtype": dtype} | values
    config |= {key: values_allowed[0] for key, values_allowed in family.only.items()}
    for conversion in family.conversions:
        config |= conversion.write(settings)
    if kind == "gpt2":
        return config | {"embd_pdrop": rate, "resid_pdrop": rate, "attn_pdrop": 0.0}
    return config | {"attention_dropout": 0.0}


def _flatten_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Moves transformers 5's `rope_parameters` table to the keys of transformers 4."""
    flat = dict(config)
    if "rope_scaling" in flat:
        flat["rope_scaling"] = _rename_kind(flat["rope_scaling"])
    table = flat.pop("rope_parameters", None)
    kind = flat.get("model_type")
    if isinstance(table, Mapping) and FULL in table:
        local = table.get(SLIDING)
        flat.setdefault("rope_local_base_freq", local.get("rope_theta") if isinstance(local, Mapping) else None)
        table = table[FULL]
    if table is not None:
        flat = _merge_rope(flat, dict(table) if isinstance(table, Mapping) else {"rope_parameters": table})
    if kind == "gpt_neox" and "rope_theta" in flat:  # two names of one number
        theta = flat.pop("rope_theta")
        if flat.setdefault("rotary_emb_base", theta) != theta:
            raise refuse(f"rope_theta = {theta!r:.40}, and rotary_emb_base = {flat['rotary_emb_base']!r:.40}",
                         rule=RULE, fix="one of them")  # fmt: skip
    return flat


def _rename_kind(scaling: Any) -> Any:
    """Drops `type`, an older name of `rope_type`, where both agree; returns None for the plain frequencies.

    Other kinds are returned as they are, to be refused in the user's words.
    """
    if not isinstance(scaling, Mapping):
        return scaling
    rope = dict(scaling)
    kind = rope.setdefault("rope_type", rope.get("type"))
    if kind not in ("default", "llama3", *LONGROPE_NAMES) or rope.pop("type", kind) != kind:
        return scaling
    return None if rope == {"rope_type": "default"} else rope


def _merge_rope(flat: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    theta = rope.pop("rope_theta", flat.get("rope_theta", 10_000.0))
    if flat.setdefault("rope_theta", theta) != theta:
        raise refuse(
            f"rope_theta = {flat['rope_theta']!r:.40}, and {theta!r:.40} in rope_parameters",
            rule=RULE,
            fix="one of them",
        )
    if "partial_rotary_factor" in rope:
        flat.setdefault("partial_rotary_factor", rope.pop("partial_rotary_factor"))
    rope = _rename_kind(rope) or {}
    if rope.get("rope_type") == "longrope" and ORIGINAL in rope:
        seq = rope.pop(ORIGINAL)
        if flat.setdefault(ORIGINAL, seq) != seq:
            got = f"{ORIGINAL} = {flat[ORIGINAL]!r:.40}, and {seq!r:.40} in rope_parameters"
            raise refuse(got, rule=RULE, fix="one of them")
    if rope and (flat.get("rope_scaling") or rope) != rope:
        got = f"rope_scaling = {flat['rope_scaling']!r:.80}, and {rope!r:.80} in rope_parameters"
        raise refuse(got, rule=RULE, fix="one of them")
    return flat | ({"rope_scaling": rope} if rope else {})


def _class_problems(config: Mapping[str, Any], family: Family) -> list[Problem]:
    names = config.get("architectures")
    if names in (None, [], [family.architecture]):
        return []
    return [Problem(f"architectures = {names!r:.80}", f"the decoder is a {family.architecture}", "another model")]


def _key_problems(config: Mapping[str, Any], family: Family) -> list[Problem]:
    """Reports unknown keys, and keys with values that the decoder does not support."""
    limits = ONLY | dict(family.only)
    handled = {*family.keys.values(), *(key for conversion in family.conversions for key in conversion.keys)}
    problems = []
    for key, value in config.items():
        if key in limits and not any(type(value) is type(choice) and value == choice for choice in limits[key]):
            values = " or ".join(map(repr, limits[key]))
            problems.append(
                Problem(f"{key} = {value!r:.100}", f"the decoder supports {key} = {values}", "another model")
            )
        elif value is not None and key not in SILENT | handled | limits.keys() and not _is_neutral(key, value, config):
            problems.append(
                Problem(f"{key} = {value!r:.100}", "every key of config.json that changes the model is supported",
                        f"another model, or delete the key if it changes no logit; {suggest(key, handled)}")
            )  # fmt: skip
    return problems


def _is_neutral(key: str, value: Any, config: Mapping[str, Any]) -> bool:
    """Whether a key that the family does not read has the value of models without what it describes."""
    if key == "layer_types" and not config.get("sliding_window"):
        return isinstance(value, list) and set(map(str, value)) == {FULL}
    return any(type(value) is type(choice) and value == choice for choice in NEUTRAL.get(key, ()))
