"""Conversions of keys of a config.json into settings of a decoder, and back, that more than one family has."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import refuse
from jaxpar.models.settings.decoder import DecoderConfig

RULE = "a config.json describes a model that jaxpar's decoder supports"
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """Keys of a config.json that describe settings together.

    Attributes:
      keys: The keys.
      read: Returns the settings of a config; raises a `JaxparError` for values that the decoder does not support.
      write: Returns the keys of settings. What cannot be expressed is left out: `make_config` compares.
    """

    keys: tuple[str, ...]
    read: Callable[[Config], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any]]


def number(config: Config, key: str, default: float, *, low: float = 0.0) -> float:
    """Returns a number of a config, or the default if it is missing or null.

    Raises:
      JaxparError: If it is no finite number above `low`.
    """
    value = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not low < value < math.inf:
        raise refuse(f"{key} = {value!r:.60}", rule=RULE, fix=f"{key} is a number above {low:g}")
    return float(value)


def integer(config: Config, key: str) -> int | None:
    """Returns a positive integer of a config, or None if it is missing or null.

    Raises:
      JaxparError: If it is anything else.
    """
    value = config.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise refuse(f"{key} = {value!r:.60}", rule=RULE, fix=f"{key} is a whole number above 0, or null")
    return value


def scale(setting: str, key: str, *, inverse: bool = False) -> Conversion:
    """The conversion of a factor; `inverse`: whether the key is its reciprocal."""

    def read(config: Config) -> dict[str, Any]:
        value = number(config, key, 1.0)
        return {setting: 1 / value if inverse else value}

    def write(settings: DecoderConfig) -> dict[str, Any]:
        value = getattr(settings, setting)
        return {key: _round_whole(1 / value) if inverse else value}

    return Conversion((key,), read, write)


def softcap(setting: str, key: str, default: float | None) -> Conversion:
    """The conversion of a softcap, null for none; `default` if the key is missing."""

    def read(config: Config) -> dict[str, Any]:
        value = config.get(key, default)
        return {setting: 0.0 if value is None else number({key: value}, key, 0.0)}

    return Conversion((key,), read, lambda settings: {key: getattr(settings, setting) or None})


def _round_whole(value: float) -> float:
    """Returns the nearest integer if the value differs from it only by rounding."""
    return float(round(value)) if math.isclose(value, round(value), rel_tol=1e-12) else value


def _read_activation(key: str, default: str) -> Callable[[Config], dict[str, Any]]:
    def read(config: Config) -> dict[str, Any]:
        value = default if config.get(key) is None else config[key]
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise refuse(f"{key} = {value!r:.60}", rule=f"the decoder supports {key} = {', '.join(ACTIVATIONS)}",
                         fix="another model")  # fmt: skip
        return {"activation": ACTIVATIONS[value]}

    return read


def activation(key: str, *unread: str, default: str) -> Conversion:
    """The conversion of the activation of the feed-forward.

    Args:
      key: Its key.
      unread: Keys that transformers does not read.
      default: The family's activation if the key is missing or null.
    """
    names = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
    names[ACTIVATIONS[default]] = default
    write = lambda settings: {key: names[settings.activation_name]}  # noqa: E731
    return Conversion((key, *unread), _read_activation(key, default), write)


def read_biases(config: Config) -> dict[str, Any]:
    """Returns the setting `biases`.

    Raises:
      JaxparError: If a key is neither true nor false.
    """
    parts = (("attention_bias", ("qkv", "out")), ("mlp_bias", ("mlp",)))
    for key, _ in parts:
        if type(config.get(key, False)) is not bool:
            raise refuse(f"{key} = {config[key]!r:.60}", rule=RULE, fix=f"{key} is true or false")
    return {"biases": tuple(name for key, names in parts if config.get(key) for name in names)}


BIASES = Conversion(
    ("attention_bias", "mlp_bias"),
    read_biases,
    lambda settings: {"attention_bias": "qkv" in settings.biased_parts, "mlp_bias": "mlp" in settings.biased_parts},
)
ATTENTION_BIAS = Conversion(
    ("attention_bias",), read_biases, lambda settings: {"attention_bias": "qkv" in settings.biased_parts}
)


def head_dim(default: int | None = None) -> Conversion:
    """The conversion of head_dim, which is dim / heads if null, and `default` if missing."""

    def read(config: Config) -> dict[str, Any]:
        return {"head_dim": (integer(config, "head_dim") if "head_dim" in config else default) or 0}

    return Conversion(("head_dim",), read, lambda settings: {"head_dim": settings.head_width})


def _one_window(settings: DecoderConfig) -> int | None:
    """The largest window of a decoder; None if it has none."""
    return max((window for window, _, _ in settings.layer_attention), default=0) or None


def uniform_window(default: int | None) -> Conversion:
    """The conversion of a sliding window that all layers have; null for none, `default` if missing."""

    def read(config: Config) -> dict[str, Any]:
        window = integer(config, "sliding_window") if "sliding_window" in config else default
        return {"windows": (window,) if window else ()}

    return Conversion(("sliding_window",), read, lambda settings: {"sliding_window": _one_window(settings)})


def layer_types(config: Config, usual: Callable[[int], str]) -> list[str]:
    """Returns the kinds of attention of all layers: those of `layer_types`, or the family's usual ones.

    Raises:
      JaxparError: If they are not one name for each layer.
    """
    count, types = config.get("num_hidden_layers"), config.get("layer_types")
    count = count if type(count) is int and 0 < count < 10_000 else 0
    if types is None:
        return [usual(i) for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not all(kind in (SLIDING, FULL) for kind in types):
        raise refuse(
            f"layer_types = {types!r:.100} for {count} layers",
            rule=f"layer_types names the attention of each layer, {SLIDING} or {FULL}",
            fix="another model",
        )
    return types


def write_layer_types(settings: DecoderConfig) -> dict[str, Any]:
    """Returns `layer_types` and `sliding_window`."""
    kinds = settings.layer_attention
    windows = [kinds[i % len(kinds)][0] for i in range(settings.layers)]
    return {"layer_types": [SLIDING if window else FULL for window in windows], "sliding_window": _one_window(settings)}


def shortest_period(values: list[Any]) -> tuple[Any, ...]:
    """Returns the shortest start of a list that, repeated, gives the list."""
    for period in range(1, len(values)):
        if all(value == values[i % period] for i, value in enumerate(values)):
            return tuple(values[:period])
    return tuple(values)


def windows(types: list[str], window: int | None) -> tuple[int, ...]:
    """Returns the setting `windows` of kinds of layers."""
    sizes = [window or 0 if kind == SLIDING else 0 for kind in types]
    return shortest_period(sizes) if any(sizes) else ()


def _after_full_layers(config: Config) -> Callable[[int], bool]:
    """Whether a layer has a window by `max_window_layers`, as in Qwen: the first layers have none."""
    first = 28 if config.get("max_window_layers") is None else config["max_window_layers"]
    if type(first) is not int:
        raise refuse(f"max_window_layers = {first!r:.60}", rule=RULE, fix="max_window_layers is a whole number")
    return lambda i: i >= first


def _write_switched_windows(settings: DecoderConfig) -> dict[str, Any]:
    keys = write_layer_types(settings)
    types = keys["layer_types"]
    first = types.index(SLIDING) if SLIDING in types else settings.layers
    return keys | {"use_sliding_window": SLIDING in types, "max_window_layers": first}


def switched_windows(
    default: int | None, usual: Callable[[Config], Callable[[int], bool]] = _after_full_layers
) -> Conversion:
    """The conversion of windows that `use_sliding_window` switches on.

    Args:
      default: Window if the key is missing; None for no window.
      usual: Maps a config without `layer_types` to whether a layer has a window.
    """

    def read(config: Config) -> dict[str, Any]:
        is_on = config.get("use_sliding_window", False)
        if type(is_on) is not bool:
            raise refuse(f"use_sliding_window = {is_on!r:.60}", rule=RULE, fix="true or false")
        window = None
        if is_on:  # otherwise transformers does not read the size
            window = integer(config, "sliding_window") if "sliding_window" in config else default
        has_window = usual(config)
        types = layer_types(config, lambda i: SLIDING if window and has_window(i) else FULL)
        return {"windows": windows(types, window)}

    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return Conversion(keys, read, _write_switched_windows)


def alternate_windows(window: int, usual: Callable[[int], str]) -> Conversion:
    """The conversion of windows in some layers, as in Gemma; `window` if the key is missing."""

    def read(config: Config) -> dict[str, Any]:
        size = integer(config, "sliding_window") if "sliding_window" in config else window
        return {"windows": windows(layer_types(config, usual), size)}

    return Conversion(("sliding_window", "layer_types"), read, write_layer_types)


def _read_query_scale(config: Config) -> dict[str, Any]:
    return {"attention_scale": number(config, "query_pre_attn_scalar", 256.0) ** -0.5}


def _write_query_scale(settings: DecoderConfig) -> dict[str, Any]:
    scale_of = settings.attention_scale or settings.head_width**-0.5
    value = _round_whole(scale_of**-2)
    return {"query_pre_attn_scalar": int(value) if value.is_integer() else value}


ATTENTION_SCALE = Conversion(
    ("attention_multiplier",),
    lambda config: {"attention_scale": number(config, "attention_multiplier", 1.0)},
    lambda settings: {"attention_multiplier": settings.attention_scale or settings.head_width**-0.5},
)
QUERY_SCALE = Conversion(("query_pre_attn_scalar",), _read_query_scale, _write_query_scale)
WIDTH_SCALE = Conversion(
    (),
    lambda config: {"embed_scale": number(config, "hidden_size", 1.0) ** 0.5},
    lambda settings: {},
)
