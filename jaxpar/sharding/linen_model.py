"""Flax Linen at the edge: a module and a way to call it become a `Blueprint`.

Parameters travel into the module in boxes whose `unbox`, which Linen calls where a
module reads a parameter, gathers and casts: also inside `nn.scan` and `nn.remat`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from flax.core import meta

from jaxpar.sharding.names import Blueprint, Compute, Leaf, Tree, Use, path_of

HIDDEN = ("params", "intermediates")  # collections that are not part of the model's state


class AtUse(struct.PyTreeNode, meta.AxisMetadata):
    """A parameter with what happens to it where the module reads it."""

    value: Any
    use: Callable[[jax.Array], jax.Array] = struct.field(pytree_node=False)

    def unbox(self):
        """Returns the gathered and cast value."""
        return self.use(self.value)

    def replace_boxed(self, val):
        """Returns the same box around another value."""
        return self.replace(value=val)

    def add_axis(self, index, params):
        """Returns itself: `use` tells a stacked parameter by its shape."""
        return self

    def remove_axis(self, index, params):
        """Returns itself: `use` tells a sliced parameter by its shape."""
        return self


class LinenModel:
    """A Linen module with its variables, as a loss function sees it: call it like the module.

    Attributes:
      training: Whether this is a training step; pass it on where the module wants to
        know (`model(x, train=model.training)`).
      state: The collections other than `params`, updated by every call.
    """

    def __init__(self, module: nn.Module, params, state, key, *, compute: Compute):
        self.module, self.params, self.state, self.key = module, params, state, key
        self.training = compute.train
        self._dtype = compute.dtype
        self._calls = 0

    def __call__(self, *args, method: Any = None, **kwargs):
        """Applies the module (or one method of it) and keeps what it wrote to its collections."""
        if self._dtype is not None:
            args, kwargs = jax.tree.map(self._cast, (args, kwargs))
        key = jax.random.fold_in(self.key, self._calls)
        self._calls += 1
        out, written = self.module.apply(
            {"params": self.params, **self.state},
            *args,
            method=method,
            mutable=list(self.state),
            rngs={"params": key, "dropout": jax.random.fold_in(key, 1)},
            **kwargs,
        )
        self.state = {**self.state, **_unboxed(dict(written))}
        return out

    def _cast(self, value):
        return value.astype(self._dtype) if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating) else value


def _unboxed(tree):
    """Returns the values without their boxes, and without the constraint that a box would apply."""
    return jax.tree.map(
        lambda box: getattr(box, "value", box) if meta.is_axis_metadata(box) else box, tree, is_leaf=meta.is_axis_metadata
    )


class _Initializer:
    """Stands in for the model in the call that creates its parameters."""

    training = True

    def __init__(self, module: nn.Module, key):
        self.module, self.key = module, key
        self.variables: dict[str, Any] = {}

    def __call__(self, *args, method: Any = None, **kwargs):
        rngs = {"params": self.key, "dropout": jax.random.fold_in(self.key, 1)}
        out, self.variables = self.module.init_with_output(rngs, *args, method=method, **kwargs)
        return out


def blueprint(module: nn.Module, call: Callable[[Any], Any], *, name: str) -> Blueprint:
    """Returns what jaxpar needs to know of a Linen module.

    Args:
      module: The module.
      call: A function of the model that calls it once as training will, on real or zero inputs.
      name: What the user calls it.
    """

    def variables(key) -> dict[str, Any]:
        model = _Initializer(module, key)
        call(model)
        return dict(model.variables)

    boxed = jax.eval_shape(variables, jax.random.key(0))
    leaves = {}
    flat, _ = jax.tree_util.tree_flatten_with_path(boxed["params"], is_leaf=meta.is_axis_metadata)
    for keys, box in flat:
        value = _unboxed(box)
        leaves[path_of(keys)] = Leaf(tuple(value.shape), value.dtype, getattr(box, "names", None))

    def init(key) -> tuple[Tree, Tree]:
        made = _unboxed(variables(key))
        collections = {name: value for name, value in made.items() if name not in HIDDEN}
        return made["params"], {"collections": collections, "key": jax.random.fold_in(key, 2)}

    fields = getattr(module, "__dataclass_fields__", {})

    def bind(values: Tree, state: Tree, use: Use, compute: Compute) -> LinenModel:
        settings = {}
        if "remat" in fields:
            settings["remat"] = compute.remat
        if compute.dtype is not None and "dtype" in fields and getattr(module, "dtype", None) in (None, jnp.float32):
            settings["dtype"] = compute.dtype
        boxes = jax.tree_util.tree_map_with_path(
            lambda keys, value: AtUse(value, lambda at_use, label=path_of(keys): use(label, at_use)), values
        )
        return LinenModel(
            module.clone(**settings) if settings else module, boxes, state["collections"], state["key"], compute=compute
        )

    def collect(model: LinenModel) -> Tree:
        return {"collections": model.state, "key": jax.random.fold_in(model.key, 0x7FFF)}

    return Blueprint(name=name, leaves=leaves, init=init, bind=bind, collect=collect, takes_remat="remat" in fields)
