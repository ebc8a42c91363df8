"""Variables of an NNX model that are used where they are read."""

from functools import cache
from typing import Any

from flax import nnx

from jaxpar.errors import JaxparError, refuse

# Flax's name of the collection, or the type, of state whose gradient is its new value: see `flax.linen.fp8_ops`
OVERWRITE = "_overwrite_with_gradient"


@cache
def used(kind: type[nnx.Variable]) -> type[nnx.Variable]:
    """Returns the type of variable that applies `use` to its whole value before anything else is done with it.

    NNX's own hook `on_get_value` comes after indexing, and not at all where an attribute of the
    value is read (`self.table.T`). A parameter cannot be assigned.
    """

    class Used(kind):
        def get_value(self, *, index=...):
            # the whole value first: the spec that it is gathered to is that of its own dims, not of a slice's
            value = self.get_metadata()["at_use"](super().get_value())
            return (
                value
                if index is ... or not hasattr(value, "shape") or type(index).__name__ == "Missing"
                else value[index]
            )

        # not what NNX itself writes: layers such as its WeightNorm put what they make of a parameter in its place
        def set_value(self, value, **index):
            if issubclass(kind, nnx.Param):
                raise assigned(self.get_metadata()["at_use"].args[0])
            super().set_value(value, **index)

        # What the variable itself has not is the value's, such as `.T`. Metadata comes first, as in NNX; private names
        # are those that copying and pickling ask for, and must gather nothing
        def __getattr__(self, name):
            if name in object.__getattribute__(self, "_var_metadata"):
                return self._var_metadata[name]
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self.get_value(), name)

    Used.__name__ = kind.__name__
    return Used


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


def overwritten(rest: nnx.State) -> frozenset[str]:
    """Returns the paths of variables whose gradient is their new value: those of Linen in `nnx.bridge.ToNNX`."""
    flat = nnx.to_flat_state(rest)
    return frozenset("/".join(map(str, path)) for path, each in flat if type(each).__name__ == OVERWRITE)
