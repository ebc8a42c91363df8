"""Flax Linen at the edge: a module and a way to call it become a `Blueprint`.

A parameter is gathered and cast where the module reads it, also inside `nn.scan` and `nn.remat`: `Parameters`. So is
a large array of another collection, which is not cast.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from jaxpar.errors import refuse, users_code
from jaxpar.models.remat import is_policy
from jaxpar.models.returned import returned
from jaxpar.sharding.author.explicit import author_rules, no_mesh, sharding_translation
from jaxpar.sharding.author.value_specs import Spec, noting_specs, value_specs
from jaxpar.sharding.calls.compute_dtype import compute_linen
from jaxpar.sharding.calls.norm_axes import over_bound_axes
from jaxpar.sharding.linen.late import check_variables, has, known_collections
from jaxpar.sharding.linen.parameters import Parameters, as_stored
from jaxpar.sharding.linen.sow import Path, parted, recorded_sows
from jaxpar.sharding.linen.streams import Streams, drawing_from, with_streams
from jaxpar.sharding.linen.variables import Initializer, Variables, unboxed
from jaxpar.sharding.names import Blueprint, Compute, Program, Tree, Use, path_of
from jaxpar.sharding.reading.called import traced


class LinenModel:
    """A Linen module with its variables, as a loss function sees it: call it like the module.

    Attributes:
      training: Whether this is a training step; pass it on where the module wants to
        know (`model(x, train=model.training)`).
      state: The collections that last (BatchNorm's), updated by every call.
      sown: What the last call sowed, by collection: `model.sown["intermediates"]`.
    """

    def __init__(
        self,
        module: nn.Module,
        params,
        state,
        key,
        *,
        compute: Compute,
        streams: Streams,
        sown: tuple[str, ...],
        read: Mapping[str, Use],
        sown_paths: set[Path],
    ):
        self.module, self.params, self.state, self.key = module, params, state, key
        self.training = compute.train
        self.sown: dict[str, Any] = dict.fromkeys(sown)
        self._dtype, self._streams, self._calls, self._read = compute.dtype, streams, 0, read
        self._sown_paths = sown_paths
        self._manual = jax.sharding.get_abstract_mesh().manual_axes

    def __call__(self, *args, method: Any = None, **kwargs):
        """Applies the module (or one method of it), keeps what it wrote to its collections; see `returned`."""
        key = jax.random.fold_in(self.key, self._calls)
        self._calls += 1
        sows = recorded_sows(lambda path, _: None if has(self.state, path) else self._sown_paths.add(path))
        large = {name: Parameters(self.state[name], use, f"collections/{name}/") for name, use in self._read.items()}
        computing = partial(_computing_in, self._dtype, self._manual)
        known = known_collections(self.module, self.state)
        with nn.intercept_methods(computing), nnx.use_eager_sharding(False), sows, known:
            out, written = drawing_from(self.module.apply, key, self._streams)(
                {"params": self.params, **self.state, **large},
                *args,
                method=method,
                mutable=[*self.state, *self.sown],
                **kwargs,
            )
        written = {name: unboxed(as_stored(tree)) for name, tree in written.items()}
        halves = {name: parted(tree, self._sown_paths, (name,)) for name, tree in written.items()}
        after = {name: halves[name][0] if name in halves else value for name, value in self.state.items()}
        check_variables(self.module, self.state, after)
        self.state = after
        self.sown = {name: halves[name][1] if name in halves else None for name in self.sown} | {
            name: apart for name, (_, apart) in halves.items() if apart
        }
        return returned(out)


def _computing_in(dtype, manual, call, args, kwargs, context):
    """Sets on every submodule what a step decides: a dtype where its own is open, and the axes of its statistics."""
    module = context.module
    if dtype is not None:
        compute_linen(module, dtype)
    with over_bound_axes(module, manual):
        return call(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Called:
    """A Linen module and a way to call it.

    Attributes:
      module: The module.
      call: Calls a model once, as training will.
      made: Key to the module's variables in boxes, traced once.
      variables: What these are.
    """

    module: nn.Module
    call: Callable[[Any], Any]
    made: Callable[[jax.Array], dict[str, Any]]
    variables: Variables

    @property
    def takes_remat(self) -> bool:
        """Whether the module has a field `remat` that holds the name of a policy."""
        fields = getattr(self.module, "__dataclass_fields__", {})
        return "remat" in fields and is_policy(getattr(self.module, "remat", None))

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        """Returns the parameters and the rest."""
        return self.variables.stored(unboxed(self.made(key)), jax.random.fold_in(key, 2))

    def bind(self, values: Tree, state: Tree, use: Use, compute: Compute, *, streams: Streams) -> LinenModel:
        """Returns the module with these values, drawing from these random streams."""

        def reads(path: str, value: jax.Array) -> jax.Array:
            return use(path, value) if self.variables.others[path].large else value

        return LinenModel(
            self.module.clone(remat=compute.remat) if self.takes_remat else self.module,
            self.variables.parameters(values, use),
            state["collections"],
            state["key"],
            compute=compute,
            streams=streams,
            sown=self.variables.sown,
            read=dict.fromkeys(self.variables.in_pieces, reads),
            sown_paths=self.variables.sown_paths,
        )

    def traced(self, streams: Streams) -> Program:
        """Returns the program of a call with these random streams."""
        return traced(self.init, partial(self.bind, streams=streams), self.call)


def blueprint(module: nn.Module, call: Callable[[Any], Any], *, name: str) -> Blueprint:
    """Returns what jaxpar needs to know of a Linen module.

    Its initializer is traced once, also where it is run later, and so is its call.

    Args:
      module: The module.
      call: A function of the model that calls it once as training will, on real or zero inputs.
      name: What the user calls it.
    """
    flat: dict[str, tuple[int, ...]] = {}
    sown: set[Path] = set()

    # inline, so that a program which runs it is as if there were no jit: that is here to be traced once
    @partial(jax.jit, inline=True)
    def made(key: jax.Array) -> dict[str, Any]:
        model = Initializer(module, key)
        with sharding_translation():
            call(model)
        flat.update(model.flat)
        sown.update(model.sown)
        return dict(model.variables)

    with users_code(
        name,
        rule="a Linen module can be called with its example of inputs",
        fix=f"jp.linen({type(module).__name__}(...), what its __call__ takes)",
    ):
        with no_mesh():
            with noting_specs() as noted:
                boxed = jax.eval_shape(made, jax.random.key(0))
        if not boxed:
            raise refuse(
                f"the loss did not call {name}, or it has no variables",
                rule="a model is called by its loss, and has parameters",
                fix='model(batch["inputs"]) in the loss',
            )
        variables = Variables.of(boxed, name, flat, sown, _written(made, boxed) if noted else {})
        called = _Called(module=module, call=call, made=made, variables=variables)
        streams, program = with_streams(called.traced, name)
    return Blueprint(
        name=name,
        leaves=variables.leaves,
        init=called.init,
        bind=partial(called.bind, streams=streams),
        collect=_collected,
        takes_remat=called.takes_remat,
        others=variables.others,
        overwritten=variables.overwritten,
        counts_layers=True,
        program=lambda: program,
        rules=tuple(author_rules()),
    )


def _written(made: Callable[[jax.Array], dict[str, Any]], boxed: Mapping[str, Any]) -> dict[str, Spec | None]:
    """Returns the specs that are written on the values of parameters, by path."""
    specs = value_specs(lambda key: unboxed(made(key)).get("params", {}), jax.random.key(0))
    paths = (path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(unboxed(boxed.get("params", {}))))
    return dict(zip(paths, specs, strict=True))


def _collected(model: LinenModel) -> Tree:
    """Returns the rest of a model's state after its calls."""
    # calls fold 0, 1, ... into the key of a step: the next step's key is none of those
    return {"collections": model.state, "key": jax.random.fold_in(model.key, 0x7FFF)}
