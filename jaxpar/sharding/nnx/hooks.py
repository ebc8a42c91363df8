"""The methods of an NNX model that a step replaces while it is traced.

Variable.get_value   of a variable with `at_use`: that, of its whole value, before anything else is done with it
Variable.set_value   of such a parameter: refused, but in a layer of ASSIGNING
model.__call__       what the loss gets is in float32: see `returned`
norm.__call__        without the axes that nothing binds: see `norm_axes`
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import JaxparError, refuse
from jaxpar.models.returned import call_in_float32
from jaxpar.sharding.calls.methods import bound, replace_method, replaced_methods
from jaxpar.sharding.calls.norm_axes import names_axes, over_bound_axes, without_axes

# Flax's own layers that assign parameters of the layer in them where they are called, and leave them so: what the
# optimizer updates is then what they assigned
ASSIGNING = (nnx.WeightNorm, nnx.SpectralNorm)

_assigning: ContextVar[bool] = ContextVar("assigning", default=False)
_hooked: ContextVar[bool] = ContextVar("hooked", default=False)
_models: weakref.WeakSet[type] = weakref.WeakSet()  # classes of the models that losses call


@contextmanager
def hooked() -> Iterator[None]:
    """Has the variables and modules of a model do in a step what they do there, while the context lasts."""
    token = _hooked.set(True)
    try:
        with _replaced():
            yield
    finally:
        _hooked.reset(token)


@contextmanager
def _replaced() -> Iterator[None]:
    with replaced_methods():
        replace_method(nnx.Variable, "get_value", _get_value)
        replace_method(nnx.Variable, "set_value", _set_value)
        replace_method(nnx.Variable, "__getattr__", _get_attribute)
        yield


def hook(model: nnx.Module) -> None:
    """Has a model, and its normalization layers, do what they do in a step: within `hooked`, or as long as it lives."""
    if not _hooked.get():
        hooks = ExitStack()
        hooks.enter_context(_replaced())
        weakref.finalize(model, hooks.close).atexit = False
    _models.add(type(model))
    replace_method(type(model), "__call__", _call_of_model)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    module: Any
    for _, module in nnx.iter_modules(model):
        if names_axes(module):
            module.axis_name = without_axes(module, lambda name: name in manual)
            replace_method(type(module), "__call__", _call_of_norm)
        if isinstance(module, ASSIGNING):
            replace_method(type(module), "__call__", _call_of_assigning)


def used(variable: nnx.Variable, value: Any, at_use: Callable) -> nnx.Variable:
    """Returns a variable with a value that `at_use` makes another of where it is read.

    Args:
      variable: Whose class and metadata it has.
      value: As stored.
      at_use: A partial, whose first argument is the path of the variable.
    """
    return type(variable).from_metadata(value, {**variable.get_metadata(), "at_use": at_use})


def is_used(variable: Any) -> bool:
    """Returns whether a variable is one that `used` made."""
    return "at_use" in variable.get_metadata()


def assigned(path: str) -> JaxparError:
    """Returns the refusal of a parameter that is assigned while a step is traced."""
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
        # the whole value first: the spec that it is gathered to is that of its own dims, not of a slice's
        value, at = at_use(before(self)), index.get("index", ...)
        return value if at is ... or not hasattr(value, "shape") or type(at).__name__ == "Missing" else value[at]

    return get_value


def _set_value(before: Callable) -> Callable:
    @wraps(before)
    def set_value(self: nnx.Variable, value: Any, **index: Any) -> None:
        at_use = self._var_metadata.get("at_use")
        if at_use is not None and isinstance(self, nnx.Param) and not _assigning.get():
            raise assigned(at_use.args[0])
        before(self, value, **index)

    return set_value


# What the variable itself has not is the value's, such as `.T`. Metadata comes first, as in NNX; private names are
# those that copying and pickling ask for, and must gather nothing
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
    """Returns whether a module is the model of a loss, or a copy of it, and not a module of its class inside of it."""
    if type(module) not in _models:
        return False
    flat = nnx.to_flat_state(nnx.state(module))
    paths = [("/".join(map(str, path)), variable) for path, variable in flat if isinstance(variable, nnx.Variable)]
    places = [(path, variable.get_metadata("at_use").args[0]) for path, variable in paths if is_used(variable)]
    return not places or any(path == place for path, place in places)


_call_of_model = partial(call_in_float32, of_loss=_is_model)


def _call_of_assigning(before: Callable) -> Callable:
    @wraps(before)
    def __call__(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        token = _assigning.set(True)
        try:
            return bound(before, self)(*args, **kwargs)
        finally:
            _assigning.reset(token)

    return __call__


def _call_of_norm(before: Callable) -> Callable:
    @wraps(before)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        with over_bound_axes(self):
            return bound(before, self)(*args, **kwargs)

    return __call__
