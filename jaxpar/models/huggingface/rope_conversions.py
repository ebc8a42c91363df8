"""Converts rotary frequencies of a config.json into settings of a decoder, and back.

    rope_scaling     plain, llama3 (`rope_stretch`), yarn (`rope_yarn`), or longrope (Phi-3)
    rope_parameters  the same in transformers 5, which `config.py` moves to the keys of transformers 4

Source: modeling_rope_utils.py of transformers 4.57.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpar.errors import refuse
from jaxpar.models.huggingface.conversions import RULE, Config, Conversion, integer, number
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.models.settings.rope import LongRopeConfig, YarnConfig

ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
STRETCH = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
YARN = (
    "factor", ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
)  # fmt: skip
LONGROPE_NAMES = ("longrope", "su", "yarn")  # Phi-3's first folders have the last two
LONGROPE_SEQ = 4096  # both lengths of a Phi-3 whose config.json lacks them


def _read_rope(config: Config) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    if not scaling:
        return {}
    rope = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = rope.pop("rope_type", None)
    if kind == "llama3" and rope.keys() == set(STRETCH):
        return {"rope_stretch": _read_stretch(rope, scaling)}
    if kind == "yarn" and "factor" in rope and rope.keys() <= set(YARN):
        return {"rope_yarn": _read_yarn(rope, config)}
    raise refuse(
        f"rope_scaling = {scaling!r:.100}",
        rule=f"rotary frequencies are plain, llama3 with {', '.join(STRETCH)}, or yarn with factor and no keys but "
        f"{', '.join(YARN)}",
        fix="another model",
    )


def _read_stretch(rope: Mapping[str, Any], scaling: object) -> tuple[float, ...]:
    if not all(type(value) in (int, float) and 0 < value < 1e9 for value in rope.values()):
        raise refuse(
            f"rope_scaling = {scaling!r:.100}", rule="the numbers of rope_scaling are positive", fix="fetch it again"
        )
    return tuple(float(rope[key]) for key in STRETCH)


def _read_yarn(rope: Mapping[str, Any], config: Config) -> YarnConfig:
    seq = integer(rope, ORIGINAL) or integer(config, LONGEST)
    if seq is None:
        raise refuse(f"yarn without {ORIGINAL} and {LONGEST}", rule=RULE, fix=f"{ORIGINAL} in rope_scaling")
    if (outer := integer(config, ORIGINAL)) not in (None, seq):  # versions of transformers read one or the other
        raise refuse(f"{ORIGINAL} = {outer}, and {seq} of rope_scaling", rule=RULE, fix="one of them")
    truncate = True if rope.get("truncate") is None else rope["truncate"]
    if type(truncate) is not bool:
        raise refuse(f"truncate = {truncate!r:.60}", rule=RULE, fix="truncate is true or false")
    factor, attention_factor = number(rope, "factor", 1.0), 0.0
    if rope.get("attention_factor") is not None:
        attention_factor = number(rope, "attention_factor", 1.0)
    elif rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        scales = [0.1 * number(rope, key, 1.0) * math.log(max(factor, 1)) + 1 for key in ("mscale", "mscale_all_dim")]
        attention_factor = scales[0] / scales[1]
    return YarnConfig(
        factor=factor, seq=seq, beta_fast=number(rope, "beta_fast", 32.0), beta_slow=number(rope, "beta_slow", 1.0),
        truncate=truncate, attention_factor=attention_factor,
    )  # fmt: skip


def _write_scaling(settings: DecoderConfig) -> dict[str, Any] | None:
    """The `rope_scaling` of llama3 or yarn; None for plain frequencies."""
    if settings.rope_stretch:
        stretch = [*settings.rope_stretch[:3], int(settings.rope_stretch[3])]
        return {"rope_type": "llama3", **dict(zip(STRETCH, stretch, strict=True))}
    yarn = settings.rope_yarn
    if not yarn.factor:
        return None
    keys = {"rope_type": "yarn", "factor": yarn.factor, ORIGINAL: yarn.seq}
    keys |= {"beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
    keys |= {} if yarn.truncate else {"truncate": False}
    return keys | ({"attention_factor": yarn.attention_factor} if yarn.attention_factor else {})


def _write_rope(settings: DecoderConfig) -> dict[str, Any]:
    scaling = _write_scaling(settings)
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": settings.rope_base}
    return {"rope_scaling": scaling, "rope_parameters": parameters}


ROPE = Conversion(("rope_scaling",), _read_rope, _write_rope)


# LongRoPE's attention factor follows from the two lengths; transformers 4 takes no other one of a Phi-3.


def _read_longrope(config: Config) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    if not scaling:
        return {}
    rope = dict(scaling) if isinstance(scaling, Mapping) else {}
    lists = ("short_factor", "long_factor")
    kinds = {rope.pop(key) for key in ("rope_type", "type") if isinstance(rope.get(key), str)}
    is_longrope = len(kinds) == 1 and kinds <= set(LONGROPE_NAMES) and rope.keys() - {"attention_factor"} == set(lists)
    if not is_longrope or not all(isinstance(rope[key], list) for key in lists):
        raise refuse(
            f"rope_scaling = {scaling!r:.100}",
            rule="rotary frequencies of Phi-3 are plain, or longrope with lists short_factor and long_factor",
            fix="another model",
        )
    original = integer(config, ORIGINAL) or LONGROPE_SEQ
    longrope = LongRopeConfig(
        seq=original, short_factors=tuple(rope["short_factor"]), long_factors=tuple(rope["long_factor"])
    )
    # a number, so that a run with another model.seq has the factor of its folder
    default = longrope.magnitude(integer(config, LONGEST) or LONGROPE_SEQ)
    return {"longrope": replace(longrope, attention_factor=number(rope, "attention_factor", default))}


def _write_longrope(settings: DecoderConfig) -> dict[str, Any]:
    longrope = settings.longrope
    if not longrope.seq:
        return _write_rope(settings)
    keys: dict[str, Any] = {"short_factor": list(longrope.short_factors), "long_factor": list(longrope.long_factors)}
    default = replace(longrope, attention_factor=0.0).magnitude(settings.seq)
    if not math.isclose(longrope.magnitude(settings.seq), default, rel_tol=1e-6):
        raise refuse(
            f"longrope.attention_factor = {longrope.attention_factor} with model.seq = {settings.seq}",
            rule="the attention factor of a Phi-3 folder follows from max_position_embeddings, which is model.seq, and "
            f"{ORIGINAL}, which is longrope.seq = {longrope.seq}: here it is {default:.6g}",
            fix="model.seq of the folder that the run started from, or longrope.attention_factor = 0",
        )
    parameters = {"rope_type": "longrope", **keys, ORIGINAL: longrope.seq, "rope_theta": settings.rope_base}
    return {"rope_scaling": {"type": "longrope", **keys}, ORIGINAL: longrope.seq, "rope_parameters": parameters}


LONGROPE = Conversion(("rope_scaling", ORIGINAL), _read_longrope, _write_longrope)


def rotary_share(key: str, default: float) -> Conversion:
    """The conversion of the share of a head's dims that rotate."""

    def write(settings: DecoderConfig) -> dict[str, Any]:
        parameters = _write_longrope(settings)["rope_parameters"]
        return {
            key: settings.rope_share,
            "rope_parameters": {**parameters, "partial_rotary_factor": settings.rope_share},
        }

    names = tuple({key, "partial_rotary_factor"})
    read = lambda config: {"rope_share": number(config, key, number(config, "partial_rotary_factor", default))}  # noqa: E731
    return Conversion(names, read, write)
