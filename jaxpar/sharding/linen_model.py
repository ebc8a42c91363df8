"""Flax Linen at the edge: a module and a way to call it become a `Blueprint`.

Parameters travel into the module in boxes whose `unbox`, which Linen calls where a
module reads a parameter, gathers and casts: also inside `nn.scan` and `nn.remat`. So do
large arrays of other collections, which are not cast.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax import struct
from flax.core import meta
from flax.errors import InvalidRngError

from jaxpar.errors import refuse, users_code
from jaxpar.sharding.names import Blueprint, Compute, Leaf, Tree, Use, path_of

HIDDEN = ("params", "intermediates")  # collections that are not part of the model's state


class AtUse(struct.PyTreeNode, meta.AxisMetadata):
    """A parameter, or a large array of another collection, with what happens to it where the module reads it."""

    value: Any
    use: Callable[[jax.Array], jax.Array] = struct.field(pytree_node=False)

    def unbox(self):
        """Returns the gathered and cast value."""
        return self.use(self.value)

    def replace_boxed(self, val):
        """Returns the same box around another value."""
        return self.replace(value=val)

    # nn.scan and nn.vmap tell boxes when they stack or slice a parameter, so that names of dims follow
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
      state: The collections that last (BatchNorm's), updated by every call.
      sown: What the last call sowed, by collection.
    """

    def __init__(
        self,
        module: nn.Module,
        params,
        state,
        key,
        *,
        compute: Compute,
        streams: tuple[str, ...],
        sown: tuple[str, ...],
        boxed: Callable[[Tree], Tree],
    ):
        self.module, self.params, self.state, self.key = module, params, state, key
        self.training = compute.train
        self.sown: dict[str, Any] = dict.fromkeys(sown)
        self._dtype, self._streams, self._calls, self._boxed = compute.dtype, streams, 0, boxed

    def __call__(self, *args, method: Any = None, **kwargs):
        """Applies the module (or one method of it) and keeps what it wrote to its collections."""
        key = jax.random.fold_in(self.key, self._calls)
        self._calls += 1
        with nn.intercept_methods(partial(_computing_in, self._dtype)):
            out, written = self.module.apply(
                {"params": self.params, **self._boxed(self.state)},
                *args,
                method=method,
                mutable=[*self.state, *self.sown],
                # each stream a key of its own: of one key, dropout and noise would draw the same bits
                rngs={name: jax.random.fold_in(key, index) for index, name in enumerate(self._streams)},
                **kwargs,
            )
        written = _unboxed(dict(written))
        self.state = {name: written.get(name, value) for name, value in self.state.items()}
        self.sown = {name: written.get(name) for name in self.sown}
        return out


def _computing_in(dtype, call, args, kwargs, context):
    """Gives every submodule that names no dtype the one that this step computes in."""
    module = context.module
    if dtype is not None and "dtype" in module.__dataclass_fields__ and module.dtype is None:
        object.__setattr__(module, "dtype", dtype)  # Linen modules are frozen; this one lives for one call
    return call(*args, **kwargs)


def _unboxed(tree):
    """Returns the values without their boxes, and without the constraint that a box would apply."""
    return jax.tree.map(
        lambda box: getattr(box, "value", box) if meta.is_axis_metadata(box) else box,
        tree,
        is_leaf=meta.is_axis_metadata,
    )


class _Initializer:
    """Stands in for the model in the call that creates its parameters."""

    training = True

    def __init__(self, module: nn.Module, key):
        self.module, self.key = module, key
        self.variables: Any = {}

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

    with users_code(
        name,
        rule="a Linen module can be called with its example of inputs",
        fix=f"jp.linen({type(module).__name__}(...), what its __call__ takes)",
    ):
        boxed = jax.eval_shape(variables, jax.random.key(0))
    if not boxed:
        raise refuse(
            f"the loss did not call {name}, or it has no variables",
            rule="a model is called by its loss, and has parameters",
            fix='model(batch["inputs"]) in the loss',
        )
    others = [name for name in boxed if name not in HIDDEN]
    sown = tuple(name for name in others if _has_tuple(boxed[name]))
    lasting = tuple(name for name in others if name not in sown)
    leaves = _leaves(boxed.get("params", {}))
    rest = {"collections": {name: boxed[name] for name in lasting}, "key": jax.eval_shape(lambda: jax.random.key(0))}
    held = _leaves(rest)

    def init(key) -> tuple[Tree, Tree]:
        made = _unboxed(variables(key))
        return made["params"], {
            "collections": {name: made[name] for name in lasting},
            "key": jax.random.fold_in(key, 2),
        }

    fields = getattr(module, "__dataclass_fields__", {})

    def bound(values: Tree, state: Tree, use: Use, compute: Compute, streams: tuple[str, ...]) -> LinenModel:
        def large(keys, value):
            path = f"collections/{path_of(keys)}"
            return AtUse(value, partial(use, path)) if path in held and held[path].large else value

        placed = module.clone(remat=compute.remat) if "remat" in fields else module
        return LinenModel(
            placed, values, state["collections"], state["key"], compute=compute, streams=streams, sown=sown,
            boxed=partial(jax.tree_util.tree_map_with_path, large),
        )  # fmt: skip

    def as_stored(_: str, value: jax.Array) -> jax.Array:
        return value

    streams = _streams(lambda names: call(bound(*init(jax.random.key(0)), as_stored, Compute(), names)), name)

    def bind(values: Tree, state: Tree, use: Use, compute: Compute) -> LinenModel:
        boxes = jax.tree_util.tree_map_with_path(lambda keys, value: AtUse(value, partial(use, path_of(keys))), values)
        return bound(boxes, state, use, compute, streams)

    def collect(model: LinenModel) -> Tree:
        # calls fold 0, 1, ... into the key of a step: the next step's key is none of those
        return {"collections": model.state, "key": jax.random.fold_in(model.key, 0x7FFF)}

    return Blueprint(
        name=name,
        leaves=leaves,
        init=init,
        bind=bind,
        collect=collect,
        takes_remat="remat" in fields,
        others=held,
        counts_layers=True,
    )


def _leaves(boxed: Tree) -> dict[str, Leaf]:
    """Returns every array of a tree, which may be in a box with names of its dims."""
    flat, _ = jax.tree_util.tree_flatten_with_path(boxed, is_leaf=meta.is_axis_metadata)
    each = ((path_of(keys), _unboxed(box), getattr(box, "names", None)) for keys, box in flat)
    return {path: Leaf(tuple(value.shape), value.dtype, names) for path, value, names in each}


def _streams(call: Callable[[tuple[str, ...]], Any], name: str) -> tuple[str, ...]:
    """Returns the random streams a module draws from, found by calling it on shapes until none is missing.

    Linen lets a missing stream fall back to `params`, which a scan may share between its steps; so
    each gets a key of its own, and `params` is not there to fall back to.
    """
    names: tuple[str, ...] = ("dropout",)
    while True:
        try:
            jax.eval_shape(lambda names=names: (call(names), None)[1])
        except InvalidRngError as error:
            missing = re.search(r'needs PRNG for "(\w+)"', str(error))
            if missing is None or missing[1] in names:
                raise refuse(
                    f"{name}: {error}", rule="a module draws from named random streams", fix="self.make_rng('noise')"
                ) from error
            names = (*names, missing[1])
        else:
            return names


def _has_tuple(tree: Any) -> bool:
    """Returns whether a collection was sown: each call appends to its tuples."""
    return any(isinstance(node, tuple) for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple)))
