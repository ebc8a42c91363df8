"""Sets a step's compute dtype on modules whose author chose none ("open").

    dtype=None                      open: Flax's own layers
    dtype=jnp.float32, the default  open: of a Linen class's field, of an NNX class's `__init__`, of a config's field
    anything else                   the author's choice, unchanged

A submodule is open too if it got its float32 from the default of the module around it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike


def compute_linen(module: nn.Module, dtype: DTypeLike) -> None:
    """Sets the dtype of a bound Linen module and of its configs, unless their author chose one.

    Also sets that of a wrapped NNX module (`nnx.bridge.to_linen`), which is created anew in every call.
    """
    if isinstance(module, nnx.bridge.ToLinen):
        _set(module, "nnx_class", partial(_build_module, module.nnx_class, dtype))
    # a field that is not an argument is set in setup(), which runs later
    for field in (candidate for candidate in dataclasses.fields(module) if candidate.init):
        value: Any = getattr(module, field.name)
        if field.name == "dtype" and (value is None or _is_default(field.default, value)):
            _set(module, "dtype", _format_dtype(value, dtype))
        elif _is_open_config(value):
            _set(module, field.name, _replace_dtype(value, dtype))


def compute_nnx(model: nnx.Module, dtype: DTypeLike) -> None:
    """Sets the dtype of every NNX module and of its configs, unless their author chose one."""
    opened: list[tuple] = []
    # in order of path length, so that a module comes before its submodules
    for path, module in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        layer: Any = module
        configs = list(_open_configs(layer))
        value = getattr(layer, "dtype", None)
        inherited = any(path[: len(ancestor)] == ancestor for ancestor in opened)
        # nnx.Embed freezes dtype to that of its float32 table, which would keep every later matmul in float32
        frozen = isinstance(layer, nnx.Embed) and value == layer.param_dtype
        default = _is_default(_default_dtype(type(layer)), value)
        if hasattr(layer, "dtype") and (value is None or frozen or default or (inherited and _is_float32(value))):
            layer.dtype = _format_dtype(value, dtype)
        if default or configs:
            opened.append(path)
        for name, config in configs:
            setattr(layer, name, _replace_dtype(config, dtype))


def _build_module(kind: Callable[..., nnx.Module], dtype: DTypeLike, *args: Any, **kwargs: Any) -> nnx.Module:
    module = kind(*args, **kwargs)
    compute_nnx(module, dtype)
    return module


def _open_configs(module: object) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in list(vars(module).items()) if _is_open_config(value))


def _replace_dtype(config: Any, dtype: DTypeLike) -> Any:
    return dataclasses.replace(config, dtype=_format_dtype(config.dtype, dtype))


def _format_dtype(value: object, dtype: DTypeLike) -> Any:
    """Returns a dtype in the model's notation: a str if the model writes its dtype as one, for `getattr(jnp, ...)`."""
    return np.dtype(dtype).name if isinstance(value, str) else dtype


def _is_open_config(value: object) -> bool:
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, nn.Module)):
        return False
    defaults = {field.name: field.default for field in dataclasses.fields(value) if field.init}
    return "dtype" in defaults and _is_default(defaults["dtype"], getattr(value, "dtype", None))


@cache
def _default_dtype(kind: type) -> Any:
    parameter = inspect.signature(kind.__init__).parameters.get("dtype")
    return None if parameter is None else parameter.default


def _is_default(default: object, value: object) -> bool:
    return _is_float32(default) and _is_float32(value)


def _is_float32(value: object) -> bool:
    return value in ("float32", np.float32, jnp.float32) or (isinstance(value, np.dtype) and value.name == "float32")


def _set(module: nn.Module, name: str, value: object) -> None:
    object.__setattr__(module, name, value)  # Linen modules are frozen; this one lives for one call
