"""Changes how Flax's layers behave while a step is traced, for both Linen and NNX.

Methods of classes are replaced during a trace and restored afterwards. Models and variables keep their classes, so that
code that checks for exact types works.

Compute dtype: a step sets its own on modules whose author chose none ("open"):

    dtype=None                      open: Flax's own layers
    dtype=jnp.float32, the default  open: of a Linen class's field, of an NNX class's `__init__`, of a config's field
    anything else                   the author's choice, unchanged

A submodule is open too if it got its float32 from the default of the module around it.

Normalization: the author meant `axis_name` for a `pmap` or a `vmap` of the model:

    axis_name="batch", under the model's own vmap(..., axis_name="batch")   the layer's mean is over that axis
    axis_name="batch", without an axis of that name                         dropped: a step has all examples
"""

import dataclasses
import inspect
import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from jaxpar.errors import refuse

_lock = threading.RLock()
_traces = 0  # running traces, in all threads: the last one to end restores the methods
_before: dict[tuple[type, str], Callable] = {}
_replaced: set[tuple[type, str, Callable]] = set()


@contextmanager
def method_overrides() -> Iterator[None]:
    """Context in which `replace_method` works; restores all replaced methods at its end."""
    global _traces
    with _lock:
        _traces += 1
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces:
                for (kind, name), method in _before.items():
                    setattr(kind, name, method)
                _before.clear()
                _replaced.clear()


def replace_method(kind: type, name: str, replacement: Callable[[Callable], Callable]) -> None:
    """Replaces a method in the class that defines it, at most once; does nothing outside of `method_overrides`.

    Args:
      kind: A class that defines or inherits the method.
      name: Name of the method.
      replacement: Maps the original method to the one that replaces it.
    """
    owner = next((ancestor for ancestor in kind.__mro__ if name in vars(ancestor)), None)
    with _lock:
        if not _traces or owner is None or (owner, name, replacement) in _replaced:
            return
        method = vars(owner)[name]
        _before.setdefault((owner, name), method)
        _replaced.add((owner, name, replacement))
        setattr(owner, name, replacement(method))


def bind_method(method: Callable, instance: object) -> Callable:
    """Binds a method from the `__dict__` of a class to an instance."""
    return method.__get__(instance, type(instance)) if hasattr(method, "__get__") else method


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


def names_axes(module: object) -> bool:
    """Whether a module is a normalization layer that averages its statistics over a named axis."""
    fields = vars(module)  # not getattr, which a module may override
    return fields.get("axis_name") is not None and "axis_index_groups" in fields


@contextmanager
def without_unbound_axes(module: Any, manual: Collection[str] = ()) -> Iterator[None]:
    """Drops from a layer's `axis_name`, until the context ends, the axes that no `vmap` or `shard_map` binds.

    A step computes statistics over all examples of the batch, so the layer does not need the axis of a `pmap`. A module
    that is no such layer is unchanged.

    Args:
      module: The module that is being called.
      manual: Mesh axes that are manual because of jaxpar's own `shard_map` around the model.

    Raises:
      JaxparError: If the layer averages over groups of devices.
    """
    if not names_axes(module):
        yield
        return
    axes = module.axis_name
    # bypasses __setattr__, as Linen's modules are frozen
    object.__setattr__(module, "axis_name", without_axes(module, lambda name: name in manual or not is_bound(name)))
    try:
        yield
    finally:
        object.__setattr__(module, "axis_name", axes)


def without_axes(module: Any, is_removed: Callable[[Any], bool]) -> Any:
    """Returns the `axis_name` of a normalization layer without some of the axes.

    Raises:
      JaxparError: If the layer averages over groups of their devices.
    """
    names = module.axis_name if isinstance(module.axis_name, tuple | list) else (module.axis_name,)
    remaining = tuple(name for name in names if not is_removed(name))
    if len(remaining) == len(names):
        return module.axis_name
    if module.axis_index_groups is not None:
        raise refuse(
            f"{type(module).__name__}(axis_name={module.axis_name!r}, axis_index_groups={module.axis_index_groups})",
            rule="statistics of a normalization are over the whole batch, which no group of devices has apart",
            fix="axis_index_groups=None",
        )
    return remaining or None


def is_bound(name: Hashable) -> bool:
    """Whether a `vmap` or a `shard_map` around the caller has an axis of this name."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True
