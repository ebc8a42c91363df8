"""Flax Linen at the edge: a module and a way to call it become a `Blueprint`.

A parameter is gathered and cast where the module reads it, also inside `nn.scan` and `nn.remat`: `Parameters`. So is
a large array of another collection, which is not cast.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core import meta
from flax.errors import InvalidRngError
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.errors import refuse, users_code
from jaxpar.sharding.compute_dtype import compute_linen
from jaxpar.sharding.explicit import outside_of_meshes, understood
from jaxpar.sharding.flat_names import fitted, flat_dims
from jaxpar.sharding.linen_parameters import Parameters, as_stored
from jaxpar.sharding.names import Blueprint, Compute, Leaf, Tree, Use, averages_over_devices, nest, path_of, pick
from jaxpar.sharding.nnx_model import names_in

HIDDEN = ("params", "intermediates")  # collections that are not part of the model's state


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
        read: Mapping[str, Use],
    ):
        self.module, self.params, self.state, self.key = module, params, state, key
        self.training = compute.train
        self.sown: dict[str, Any] = dict.fromkeys(sown)
        self._dtype, self._streams, self._calls, self._read = compute.dtype, streams, 0, read

    def __call__(self, *args, method: Any = None, **kwargs):
        """Applies the module (or one method of it) and keeps what it wrote to its collections."""
        key = jax.random.fold_in(self.key, self._calls)
        self._calls += 1
        large = {name: Parameters(self.state[name], use, f"collections/{name}/") for name, use in self._read.items()}
        with nn.intercept_methods(partial(_computing_in, self._dtype)), nnx.use_eager_sharding(False):
            out, written = self.module.apply(
                {"params": self.params, **self.state, **large},
                *args,
                method=method,
                mutable=[*self.state, *self.sown],
                # each stream a key of its own: of one key, dropout and noise would draw the same bits
                rngs={name: jax.random.fold_in(key, index) for index, name in enumerate(self._streams)},
                **kwargs,
            )
        written = {name: _unboxed(as_stored(tree)) for name, tree in written.items()}
        self.state = {name: written.get(name, value) for name, value in self.state.items()}
        self.sown = {name: written.get(name) for name in self.sown}
        return out


def _computing_in(dtype, call, args, kwargs, context):
    """Sets on every submodule what a step decides: a dtype where its own is open, and statistics of all examples."""
    if dtype is not None:
        compute_linen(context.module, dtype)
    if averages_over_devices(context.module):
        object.__setattr__(context.module, "axis_name", None)  # Linen modules are frozen; this one lives for one call
    return call(*args, **kwargs)


def _names(path: str, box: Any) -> tuple | None:
    """Returns the names that a box gives to dims: Linen's own, or that of an NNX variable inside of Linen."""
    return getattr(box, "names", None) or names_in(path, getattr(box, "metadata", {}))


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
        self.flat: dict[str, tuple[int, ...]] = {}  # of parameters with flat dims: see `flat_names`

    def __call__(self, *args, method: Any = None, **kwargs):
        rngs = {"params": self.key, "dropout": jax.random.fold_in(self.key, 1)}
        # eager sharding of NNX modules inside: names stay metadata, as those of Linen do
        with nn.intercept_methods(self._noting), nnx.use_eager_sharding(False):
            out, self.variables = self.module.init_with_output(rngs, *args, method=method, **kwargs)
        return out

    def _noting(self, call, args, kwargs, context):
        """Notes the parameters whose initializers are called with flat dims."""
        module = context.module
        if isinstance(module, nn.DenseGeneral):
            count = lambda dims: len(dims) if isinstance(dims, Sequence) else 1  # noqa: E731
            dims = flat_dims(count(module.axis), count(module.features), count(module.batch_dims))
            self.flat |= {"/".join((*module.path, name)): flat for name, flat in dims.items()}
        return call(*args, **kwargs)


def blueprint(module: nn.Module, call: Callable[[Any], Any], *, name: str) -> Blueprint:
    """Returns what jaxpar needs to know of a Linen module.

    Args:
      module: The module.
      call: A function of the model that calls it once as training will, on real or zero inputs.
      name: What the user calls it.
    """
    flat_of: dict[str, tuple[int, ...]] = {}

    def variables(key) -> dict[str, Any]:
        model = _Initializer(module, key)
        with understood():
            call(model)
        flat_of.update(model.flat)
        return dict(model.variables)

    called = partial(
        users_code,
        name,
        rule="a Linen module can be called with its example of inputs",
        fix=f"jp.linen({type(module).__name__}(...), what its __call__ takes)",
    )
    with called(), outside_of_meshes():
        boxed = jax.eval_shape(variables, jax.random.key(0))
    if not boxed:
        raise refuse(
            f"the loss did not call {name}, or it has no variables",
            rule="a model is called by its loss, and has parameters",
            fix='model(batch["inputs"]) in the loss',
        )
    own = jax.tree.structure(boxed.get("params", {}), is_leaf=meta.is_axis_metadata)
    leaves = _leaves(boxed.get("params", {}), name, flat_of)
    # names in Linen's own tree may have a "/" (`nn.WeightNorm`); in jaxpar's that leads to one more dict
    words = [tuple(path.split("/")) for path in leaves]
    others = [name for name in boxed if name not in HIDDEN]
    sown = tuple(name for name in others if _has_tuple(boxed[name]))
    lasting = tuple(name for name in others if name not in sown)
    rest = {"collections": {name: boxed[name] for name in lasting}, "key": jax.eval_shape(lambda: jax.random.key(0))}
    held = _leaves(rest, name)
    in_pieces = sorted({path.split("/")[1] for path, leaf in held.items() if leaf.large})

    def init(key) -> tuple[Tree, Tree]:
        made = _unboxed(variables(key))
        return nest(dict(zip(words, own.flatten_up_to(made.get("params", {})), strict=True))), {
            "collections": {name: made[name] for name in lasting},
            "key": jax.random.fold_in(key, 2),
        }

    fields = getattr(module, "__dataclass_fields__", {})

    def bound(values: Tree, state: Tree, use: Use, compute: Compute, streams: tuple[str, ...]) -> LinenModel:
        def reads(path: str, value: jax.Array) -> jax.Array:
            return use(path, value) if held[path].large else value

        placed = module.clone(remat=compute.remat) if "remat" in fields else module
        params = Parameters(jax.tree.unflatten(own, [pick(values, each) for each in words]), use)
        return LinenModel(
            placed, params, state["collections"], state["key"], compute=compute, streams=streams, sown=sown,
            read=dict.fromkeys(in_pieces, reads),
        )  # fmt: skip

    def drawing(streams: tuple[str, ...]) -> None:
        values, state = init(jax.random.key(0))
        call(bound(values, state, lambda path, value: value, Compute(), streams))

    with called():
        streams = _streams(drawing, name)

    def bind(values: Tree, state: Tree, use: Use, compute: Compute) -> LinenModel:
        return bound(values, state, use, compute, streams)

    @cache
    def program() -> tuple[ClosedJaxpr, tuple[str, ...]]:
        values, state = jax.eval_shape(init, jax.random.key(0))
        run = jax.make_jaxpr(lambda values, state: call(bind(values, state, lambda _, value: value, Compute())))
        with understood(), outside_of_meshes():
            traced = run(values, state)
        return traced, tuple(path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(values)[0])

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
        program=program,
    )


def _leaves(boxed: Tree, name: str, flat: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> dict[str, Leaf]:
    """Returns every array of a tree, which may be in a box with names of its dims, or of its flat dims."""
    leaves = {}
    for keys, box in jax.tree_util.tree_flatten_with_path(boxed, is_leaf=meta.is_axis_metadata)[0]:
        value, path = _unboxed(box), path_of(keys)
        names = _names(path, box)
        names = names and fitted(names, len(value.shape), flat.get(path, ()))
        if path in leaves:
            raise refuse(f"{name} has {path} twice", rule="a parameter has a path of its own", fix='names without "/"')
        leaves[path] = Leaf(tuple(value.shape), value.dtype, names)
    return leaves


def _streams(call: Callable[[tuple[str, ...]], Any], name: str) -> tuple[str, ...]:
    """Returns the random streams a module draws from, found by calling it on shapes until none is missing.

    Linen lets a missing stream fall back to `params`, which a scan may share between its steps; so
    each gets a key of its own, and `params` is not there to fall back to.
    """
    names: tuple[str, ...] = ("dropout",)
    while True:
        try:
            with understood(), outside_of_meshes():
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
