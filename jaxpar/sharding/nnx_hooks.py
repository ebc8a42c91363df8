"""Replaces methods of an NNX model while a step is traced: the model gathers variables where it reads them.

    Variable.get_value   of a variable with `at_use`: applies it to the whole value, before any indexing
    Variable.set_value   of such a parameter: refused, except in a layer of ASSIGNING
    model.__call__       returns float32 to the loss: see `cast_output`
    norm.__call__        runs without the axes that no vmap or shard_map binds: see `flax_layers.py`

To treat another kind of variable differently, edit `attach_use`.

Arrays that a module holds in attributes instead of variables, often tables of positions, are found before any trace:

    self.table = jnp.arange(8)            in a module that is a pytree    data, as Flax treats an array
    self.tables = (jnp.arange(8), ...)    likewise                        refused: Flax finds no array in it
    self.table = jnp.arange(8)            with pytree=False               refused: on shapes alone it is lost
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import jax
import jax.core
import numpy as np
from flax import nnx

from jaxpar.errors import JaxparError, refuse
from jaxpar.models.output_dtype import call_in_float32
from jaxpar.sharding.flax_layers import (
    bind_method,
    method_overrides,
    names_axes,
    replace_method,
    without_axes,
    without_unbound_axes,
)

# Flax's layers that assign parameters of their inner layer in a call and do not restore them: the optimizer then
# updates the assigned values
ASSIGNING = (nnx.WeightNorm, nnx.SpectralNorm)

_assigning: ContextVar[bool] = ContextVar("assigning", default=False)
_hooked: ContextVar[bool] = ContextVar("hooked", default=False)
_models: weakref.WeakSet[type] = weakref.WeakSet()  # classes of the models that losses call


@contextmanager
def step_hooks() -> Iterator[None]:
    """Context in which the methods of variables and modules are replaced for a step."""
    token = _hooked.set(True)
    try:
        with _override_variable_methods():
            yield
    finally:
        _hooked.reset(token)


@contextmanager
def _override_variable_methods() -> Iterator[None]:
    with method_overrides():
        replace_method(nnx.Variable, "get_value", _get_value)
        replace_method(nnx.Variable, "set_value", _set_value)
        replace_method(nnx.Variable, "__getattr__", _get_attribute)
        yield


def hook(model: nnx.Module) -> None:
    """Replaces methods of a model and its norm layers, until `step_hooks` ends or else the model is deleted."""
    if not _hooked.get():
        hooks = ExitStack()
        hooks.enter_context(_override_variable_methods())
        weakref.finalize(model, hooks.close).atexit = False
    _models.add(type(model))
    replace_method(type(model), "__call__", _call_model)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    module: Any
    for _, module in nnx.iter_modules(model):
        if names_axes(module):
            module.axis_name = without_axes(module, lambda name: name in manual)
            replace_method(type(module), "__call__", _call_norm)
        if isinstance(module, ASSIGNING):
            replace_method(type(module), "__call__", _call_assigning)


def attach_use(variable: nnx.Variable, value: object, at_use: Callable) -> nnx.Variable:
    """Returns a variable that applies `at_use` to its value where the model reads it.

    Args:
      variable: The variable whose class and metadata the new one gets.
      value: The stored value.
      at_use: A `partial` whose first argument is the path of the variable.
    """
    return type(variable).from_metadata(value, {**variable.get_metadata(), "at_use": at_use})


def has_use(variable: nnx.Variable) -> bool:
    """Whether `attach_use` created a variable."""
    return "at_use" in variable.get_metadata()


def assignment_error(path: str) -> JaxparError:
    """Returns the error for a parameter that is assigned while a step is traced."""
    return refuse(
        f"the parameter {path} is assigned while the model is called",
        rule="a parameter is changed by the optimizer alone; what a model writes itself is a variable of another kind",
        fix="nnx.Variable, or a class of your own that is one, in place of nnx.Param",
    )


# NNX's own hook `on_get_value` comes after indexing, and not at all where an attribute of the value is read
# (`self.table.T`)
def _get_value(before: Callable) -> Callable:
    @wraps(before)
    def get_value(self: nnx.Variable, **index: Any) -> Any:
        at_use = self._var_metadata.get("at_use")
        if at_use is None:
            return before(self, **index)
        # the whole value first: the spec of the gather is for its own dims, not for those of a slice
        value, key = at_use(before(self)), index.get("index", ...)
        return value if key is ... or not hasattr(value, "shape") or type(key).__name__ == "Missing" else value[key]

    return get_value


def _set_value(before: Callable) -> Callable:
    @wraps(before)
    def set_value(self: nnx.Variable, value: object, **index: Any) -> None:
        at_use = self._var_metadata.get("at_use")
        if at_use is not None and isinstance(self, nnx.Param) and not _assigning.get():
            raise assignment_error(at_use.args[0])
        before(self, value, **index)

    return set_value


# Attributes that the variable lacks are the value's, such as `.T`. Metadata comes first, as in NNX. Copying and
# pickling look up private names, which must gather nothing
def _get_attribute(before: Callable) -> Callable:
    @wraps(before)
    def __getattr__(self: nnx.Variable, name: str) -> Any:
        metadata = object.__getattribute__(self, "_var_metadata")
        if "at_use" not in metadata or name in metadata:
            return before(self, name)
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.get_value(), name)

    return __getattr__


def _is_model(module: nnx.Module) -> bool:
    """Whether a module is the model that a loss calls or a copy of it, not a submodule of the same class."""
    if type(module) not in _models:
        return False
    flat = nnx.to_flat_state(nnx.state(module))
    paths = [("/".join(map(str, path)), variable) for path, variable in flat if isinstance(variable, nnx.Variable)]
    places = [(path, variable.get_metadata("at_use").args[0]) for path, variable in paths if has_use(variable)]
    return not places or any(path == place for path, place in places)


_call_model = partial(call_in_float32, is_loss_model=_is_model)


def _call_assigning(before: Callable) -> Callable:
    @wraps(before)
    def __call__(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        token = _assigning.set(True)
        try:
            return bind_method(before, self)(*args, **kwargs)
        finally:
            _assigning.reset(token)

    return __call__


def _call_norm(before: Callable) -> Callable:
    @wraps(before)
    def __call__(self: object, *args: Any, **kwargs: Any) -> Any:
        with without_unbound_axes(self):
            return bind_method(before, self)(*args, **kwargs)

    return __call__


def mark_arrays(model: object) -> Any:
    """Marks array attributes of a module as data, and returns the module.

    Flax marks arrays itself, but not the tracers that replace them while a function is traced.
    """
    if isinstance(model, nnx.Module):
        for _, module in nnx.iter_modules(model):
            for key, value in [*vars(module).items()]:
                if isinstance(value, jax.core.Tracer):
                    setattr(module, key, nnx.data(value))
    return model


def check_module(model: nnx.Module, name: str) -> None:
    """Refuses a module with pytree=False that has an array in an attribute.

    Args:
      model: The module with tracers; in an abstract module, arrays look like attributes that are shapes.
      name: The user's name of the model.

    Raises:
      JaxparError: If there is such an attribute; the message names the first.
    """
    for path, module in nnx.iter_modules(model):
        for key, value in vars(module).items() if not module._pytree__is_pytree else ():
            if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value, is_leaf=_is_flax_node)):
                raise refuse(
                    f"{_join_path(path, key)} of {name} holds an array, in a module with pytree=False",
                    rule="its arrays are nnx.Variables: Flax finds no others when a model is built without values",
                    fix=f"self.{key} = nnx.Variable(...), or class {type(module).__name__}(nnx.Module)",
                )


def check_shapes(abstract: nnx.Module, name: str) -> None:
    """Refuses an abstract module with an array inside of an attribute that Flax does not search, such as a tuple.

    Raises:
      JaxparError: If there is such an attribute; the message names the first.
    """
    for path, module in nnx.iter_modules(abstract):
        for key, value in vars(module).items():
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                raise refuse(
                    f"{_join_path(path, key)} of {name} is a {type(value).__name__} with an array inside",
                    rule="a model keeps an array in a variable or an attribute, and several in a Flax container",
                    fix=f"self.{key} = nnx.data(...), or nnx.List([nnx.Param(...), ...]) if they are trained",
                )


def _join_path(path: tuple, key: str) -> str:
    return "/".join(map(str, (*path, key)))


def _is_flax_node(value: object) -> bool:
    """Whether a value registers its arrays with Flax itself: a variable or a submodule."""
    return isinstance(value, nnx.Variable | nnx.Module)
