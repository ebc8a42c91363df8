"""Builds a `Blueprint` from a Flax Linen module and a function that calls it.

A parameter is gathered and cast where the module reads it, also inside `nn.scan` and `nn.remat`: see `Parameters`. A
large array of another collection is gathered too, but not cast.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from jaxpar.errors import refuse, user_code_errors
from jaxpar.models.output_dtype import cast_output
from jaxpar.models.remat import is_policy
from jaxpar.sharding.author.explicit import author_rules, no_mesh, sharding_translation
from jaxpar.sharding.author.value_specs import Spec, recording_specs, value_specs
from jaxpar.sharding.flax_layers import compute_linen, without_unbound_axes
from jaxpar.sharding.infer_names.infer_dims import trace_program
from jaxpar.sharding.linen_calls import (
    Parameters,
    Path,
    Streams,
    find_streams,
    recording_sows,
    split_sown,
    to_dict,
    with_rngs,
)
from jaxpar.sharding.linen_variables import Initializer, Variables, check_variables, has_path, lock_collections, unbox
from jaxpar.sharding.names import Blueprint, Compute, Program, Tree, Use, format_path


class LinenModel:
    """A Linen module with its variables, as a loss function sees it: call it like the module.

    Attributes:
      training: Whether this is a training step; pass it to the module if that has an argument for it, as in
        `model(x, train=model.training)`.
      state: The collections that persist, such as BatchNorm's; every call updates them.
      sown: Values that the last call sowed, by collection: `model.sown["intermediates"]`.
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

    def __call__(self, *args, method: Callable | str | None = None, **kwargs):
        """Applies the module (or one method of it) and stores its updated collections; see `cast_output`."""
        key = jax.random.fold_in(self.key, self._calls)
        self._calls += 1
        sows = recording_sows(lambda path, _: None if has_path(self.state, path) else self._sown_paths.add(path))
        large = {name: Parameters(self.state[name], use, f"collections/{name}/") for name, use in self._read.items()}
        computing = partial(_prepare_call, self._dtype, self._manual)
        collections = lock_collections(self.module, self.state)
        with nn.intercept_methods(computing), nnx.use_eager_sharding(False), sows, collections:
            out, written = with_rngs(self.module.apply, key, self._streams)(
                {"params": self.params, **self.state, **large},
                *args,
                method=method,
                mutable=[*self.state, *self.sown],
                **kwargs,
            )
        written = {name: unbox(to_dict(tree)) for name, tree in written.items()}
        parts = {name: split_sown(tree, self._sown_paths, (name,)) for name, tree in written.items()}
        after = {name: parts[name][0] if name in parts else value for name, value in self.state.items()}
        check_variables(self.module, self.state, after)
        self.state = after
        self.sown = {name: parts[name][1] if name in parts else None for name in self.sown} | {
            name: sown_values for name, (_, sown_values) in parts.items() if sown_values
        }
        return cast_output(out)


def _prepare_call(dtype, manual, call, args, kwargs, context):
    """Around each submodule's call: sets the step's dtype if its author chose none, and drops unbound norm axes."""
    module = context.module
    if dtype is not None:
        compute_linen(module, dtype)
    with without_unbound_axes(module, manual):
        return call(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class _CallableModule:
    """A Linen module and a function that calls it.

    Attributes:
      module: The module.
      call: Calls a model once, in the way that the loss will.
      make_variables: Maps a key to the module's boxed variables; traced once.
      variables: The structure of these variables.
    """

    module: nn.Module
    call: Callable[[Any], Any]
    make_variables: Callable[[jax.Array], dict[str, Any]]
    variables: Variables

    @property
    def takes_remat(self) -> bool:
        """Whether the module has a field `remat` that holds the name of a policy."""
        fields = getattr(self.module, "__dataclass_fields__", {})
        return "remat" in fields and is_policy(getattr(self.module, "remat", None))

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        """Initializes the parameters and the rest of the state."""
        return self.variables.to_state(unbox(self.make_variables(key)), jax.random.fold_in(key, 2))

    def bind(self, values: Tree, state: Tree, use: Use, compute: Compute, *, streams: Streams) -> LinenModel:
        """Binds the module to parameters and state; it draws from these random streams."""

        def read_param(path: str, value: jax.Array) -> jax.Array:
            return use(path, value) if self.variables.others[path].large else value

        return LinenModel(
            self.module.clone(remat=compute.remat) if self.takes_remat else self.module,
            self.variables.parameters(values, use),
            state["collections"],
            state["key"],
            compute=compute,
            streams=streams,
            sown=self.variables.sown,
            read=dict.fromkeys(self.variables.large_collections, read_param),
            sown_paths=self.variables.sown_paths,
        )

    def bind_module(self, values: Tree, state: Tree) -> nn.Module:
        """Returns the module bound to these arrays."""
        return self.module.bind({"params": self.variables.linen_tree(values), **state["collections"]})

    def trace_streams(self, streams: Streams) -> Program:
        """Traces a call with these random streams."""
        return trace_program(self.init, partial(self.bind, streams=streams), self.call)


def blueprint(module: nn.Module, call: Callable[[Any], Any], *, name: str) -> Blueprint:
    """Builds the blueprint of a Linen module.

    The initializer and the call are each traced once; the initializer may run later.

    Args:
      module: The module.
      call: A function that calls the model once, in the way that the loss will, on real or zero inputs.
      name: The user's name of the module.
    """
    flat: dict[str, tuple[int, ...]] = {}
    sown: set[Path] = set()

    # jit, to be traced once; inline, so that a program that calls it is the same as without jit
    @partial(jax.jit, inline=True)
    def init_variables(key: jax.Array) -> dict[str, Any]:
        model = Initializer(module, key)
        with sharding_translation():
            call(model)
        flat.update(model.flat)
        sown.update(model.sown)
        return dict(model.variables)

    with user_code_errors(
        name,
        rule="a Linen module can be called with its example of inputs",
        fix=f"jp.from_linen({type(module).__name__}(...), what its __call__ takes)",
    ):
        with no_mesh():
            with recording_specs() as noted:
                boxed = jax.eval_shape(init_variables, jax.random.key(0))
        if not boxed:
            raise refuse(
                f"the loss did not call {name}, or it has no variables",
                rule="a model is called by its loss, and has parameters",
                fix='model(batch["inputs"]) in the loss',
            )
        variables = Variables.from_boxed(
            boxed, name, flat, sown, _written_specs(init_variables, boxed) if noted else {}
        )
        called = _CallableModule(module=module, call=call, make_variables=init_variables, variables=variables)
        streams, program = find_streams(called.trace_streams, name)
    return Blueprint(
        name=name,
        leaves=variables.leaves,
        init=called.init,
        bind=partial(called.bind, streams=streams),
        collect=_collect,
        module=called.bind_module,
        takes_remat=called.takes_remat,
        other_leaves=variables.others,
        overwritten=variables.overwritten,
        counts_layers=True,
        program=lambda: program,
        rules=tuple(author_rules()),
    )


def _written_specs(
    make_variables: Callable[[jax.Array], dict[str, Any]], boxed: Mapping[str, object]
) -> dict[str, Spec | None]:
    specs = value_specs(lambda key: unbox(make_variables(key)).get("params", {}), jax.random.key(0))
    paths = (format_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(unbox(boxed.get("params", {}))))
    return dict(zip(paths, specs, strict=True))


def _collect(model: LinenModel) -> Tree:
    # calls fold 0, 1, ... into the key of a step: the next step's key must be none of those
    return {"collections": model.state, "key": jax.random.fold_in(model.key, 0x7FFF)}
