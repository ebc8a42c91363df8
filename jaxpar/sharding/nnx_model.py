"""Builds a `Blueprint` from a factory of Flax NNX modules.

While a step is traced, `get_value` of each Param gathers and casts it (`nnx_hooks.py`), also inside of the user's scan
and remat, without editing the module. Large variables of other kinds are gathered too, but not cast.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core import spmd

from jaxpar.errors import refuse, user_code_errors
from jaxpar.models.remat import is_policy
from jaxpar.sharding.author.explicit import author_rules, no_mesh, sharding_translation
from jaxpar.sharding.author.value_specs import Spec, recording_specs, value_specs
from jaxpar.sharding.flax_layers import compute_nnx
from jaxpar.sharding.names import OVERWRITE, Blueprint, Compute, Leaf, Tree, Use, format_path, nest, pick
from jaxpar.sharding.nnx_hooks import (
    ASSIGNING,
    assignment_error,
    attach_use,
    check_module,
    check_shapes,
    has_use,
    hook,
    mark_arrays,
)
from jaxpar.sharding.rules import fit_names, flat_dims, without_blank_names


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts:
    """The parts of a module: its graph, which is the same in every step, and the structure of its variables.

    Attributes:
      name: The user's name of the model.
      graph: The module without its variables.
      params: Its parameters, as shapes, with their metadata.
      rest: Its other variables likewise, and arrays that are plain attributes.
      others: Path to `Leaf` for every array of the rest.
      bridges: Paths of the Linen modules in it. They take all their variables at once and check exact types, so these
        are gathered before the call.
    """

    name: str
    graph: Any
    params: nnx.State
    rest: nnx.State
    others: Mapping[str, Leaf]
    bridges: tuple[tuple[str, ...], ...]

    def bind(self, values: Tree, state: Tree, use: Use, compute: Compute) -> nnx.Module:
        """Binds the module to parameters and state."""
        model = nnx.merge(
            self.graph,
            nnx.map_state(partial(self._bind_variable, values, use), self.params),
            nnx.map_state(partial(self._fill_state, state, use), self.rest),
        )
        hook(model)
        return _configure(model, compute)

    def module(self, values: Tree, state: Tree) -> nnx.Module:
        """Returns the user's own module with these arrays, in eval mode: nothing of jaxpar is left in it."""
        model = nnx.merge(
            self.graph,
            nnx.map_state(partial(_fill_variable, values), self.params),
            nnx.map_state(partial(_fill_variable, state), self.rest),
        )
        model.eval()
        return model

    def _bind_variable(self, values: Tree, use: Use, path, variable: nnx.Variable) -> nnx.Variable:
        """Returns a variable that applies `use` to its value where the model reads it."""
        words = _words(path)
        at_use, value = partial(use, "/".join(words)), pick(values, words)
        if self._is_bridged(words):
            return variable.replace(at_use(value))
        return attach_use(variable, value, at_use)

    def _is_bridged(self, words: tuple[str, ...]) -> bool:
        return any(words[: len(bridge)] == bridge for bridge in self.bridges)

    def _fill_state(self, state: Tree, use: Use, path, variable: object) -> Any:
        """Returns a variable of the rest with its value; the model may update it."""
        words = _words(path)
        if not isinstance(variable, nnx.Variable):
            return pick(state, words)  # an array that is an attribute
        # small other state is whole: BatchNorm's statistics, keys
        large = self.others["/".join(words)].large
        return self._bind_variable(state, use, path, variable) if large else variable.replace(pick(state, words))

    def collect(self, model: nnx.Module) -> Tree:
        """Returns the rest of the state after a call; drops variables that the model sowed during the call."""
        params, rest_paths = (
            {_words(path) for path, _ in nnx.to_flat_state(variables)} for variables in (self.params, self.rest)
        )
        flat = {_words(path): variable for path, variable in nnx.to_flat_state(nnx.state(model))}
        for path, variable in flat.items():
            if path not in rest_paths | params and not isinstance(variable, nnx.Intermediate):
                raise refuse(
                    f"{self.name} made the variable {'/'.join(path)} while it was called",
                    rule="state that lasts is there from the start: a compiled step cannot grow it",
                    fix="make it in __init__, or sow it as nnx.Intermediate, which a step drops",
                )
            if path in params and not has_use(variable) and not self._is_bridged(path):
                raise assignment_error("/".join(path))
        return nest({path: _array(path, flat[path]) for path in sorted(rest_paths)})

    def assigned(self, model: nnx.Module) -> dict[str, Any]:
        """Returns path to value, after a call, of the parameters that Flax's own layers assign."""
        layers = [path for path, module in nnx.iter_modules(model) if isinstance(module, ASSIGNING)]
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        within = lambda path: any(path[: len(layer) + 1] == (*layer, "layer_instance") for layer in layers)  # noqa: E731
        return {"/".join(_words(path)): _array(path, variable) for path, variable in flat if within(path)}


def blueprint(factory: Callable[..., Any], *, name: str) -> Blueprint:
    """Builds the blueprint of the module that `factory(rngs)` returns.

    Nothing is allocated: the module is built abstractly.

    Args:
      factory: Returns an NNX module, or the blueprint of another model.
      name: The user's name of the model.

    Raises:
      JaxparError: If the factory cannot be called with `rngs`, or returns no such model.
    """

    def build(key) -> Any:
        with nnx.use_eager_sharding(False), sharding_translation():  # names stay metadata; jaxpar resolves them
            return mark_arrays(_call(factory, nnx.Rngs(key), name))

    # jit, to be traced once; inline, so that a program that calls it is the same as without jit
    @partial(jax.jit, inline=True)
    def init(key) -> tuple[Tree, Tree]:
        _, param_state, rest_state = nnx.split(build(key), nnx.Param, ...)
        return _values(param_state), _values(rest_state)

    with recording_specs() as noted:
        abstract = _abstract(build, name)
    if isinstance(abstract, Blueprint):
        return abstract
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)
    flat = _flat_dims(abstract)
    specs: dict[str, Spec | None] = {}
    if noted:
        arrays = jax.tree_util.tree_leaves_with_path((_values(params), _values(rest)))
        specs = dict(zip((format_path(keys) for keys, _ in arrays), value_specs(init, jax.random.key(0)), strict=True))
    leaves, others = (
        _leaves(variables, name, flat, {path[2:]: spec for path, spec in specs.items() if path.startswith(f"{i}/")})
        for i, variables in enumerate((params, rest))
    )
    modules = list(nnx.iter_modules(abstract))
    bridges = tuple(_words(path) for path, module in modules if isinstance(module, nnx.bridge.ToNNX))
    parts = _Parts(name=name, graph=graph, params=params, rest=rest, others=others, bridges=bridges)
    return Blueprint(
        name=type(abstract).__name__,
        leaves=without_blank_names(leaves),
        init=init,
        bind=parts.bind,
        collect=parts.collect,
        module=parts.module,
        takes_remat=any(is_policy(getattr(module, "remat", None)) for _, module in modules),
        other_leaves=others,
        rules=tuple(author_rules()),
        overwritten=_find_overwritten(rest),
        assigned=parts.assigned if any(isinstance(module, ASSIGNING) for _, module in modules) else None,
    )


def _find_overwritten(rest: nnx.State) -> frozenset[str]:
    """Returns the paths of variables whose gradient is their new value: Linen's, wrapped in `nnx.bridge.ToNNX`."""
    flat = nnx.to_flat_state(rest)
    return frozenset("/".join(map(str, path)) for path, variable in flat if type(variable).__name__ == OVERWRITE)


def _abstract(build: Callable[[jax.Array], Any], name: str) -> nnx.Module | Blueprint:
    """Calls the factory abstractly: returns a module whose variables hold shapes, or the blueprint that it returns."""
    blueprints: list[Blueprint] = []

    def build_checked() -> Any:
        model = build(jax.random.key(0))
        if isinstance(model, Blueprint):
            blueprints.append(model)  # shapes alone already, not a tree of arrays
            return None
        if isinstance(model, nnx.Module):
            check_module(model, name)
            return model
        linen = isinstance(model, nn.Module)
        raise refuse(
            f"{name} returned {type(model).__name__}" + ", a Linen module on its own" * linen,
            rule="a model is a function of `rngs` that returns an nnx.Module, or a Linen module in jp.from_linen",
            fix=f"jp.from_linen({type(model).__name__}(...), jnp.zeros([1, ...])), with an example of its inputs"
            if linen
            else "lambda rngs: MyNet(..., rngs=rngs)",
        )

    rule = "a model can be made from `rngs`, on shapes alone"
    with user_code_errors(name, rule=rule, fix="the line of the model that this names"), no_mesh():
        abstract = nnx.eval_shape(build_checked)
    if blueprints:
        return blueprints[0]
    check_shapes(abstract, name)
    return abstract


def _flat_dims(model: nnx.Module) -> dict[tuple, tuple[int, ...]]:
    """Finds the parameters whose initializers are called with flat dims: see `flat_dims`."""
    flat: dict[tuple, tuple[int, ...]] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.LinearGeneral):
            dims = flat_dims(len(module.in_features), len(module.out_features), len(module.batch_axis))
            flat |= {(*path, name): dim_counts for name, dim_counts in dims.items()}
    return flat


def _call(factory: Callable[..., nnx.Module], rngs: nnx.Rngs, name: str) -> nnx.Module:
    """Calls the factory with `rngs`, by keyword if it has an argument of that name."""
    parameters = _parameters(factory)
    needed = [
        key for key, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if "rngs" in parameters and needed in (["rngs"], []):
        return factory(rngs=rngs)
    if (
        "rngs" not in parameters
        and parameters
        and len(needed) <= 1
        and parameters[next(iter(parameters))].kind != inspect.Parameter.KEYWORD_ONLY
    ):
        return factory(rngs)
    missing = ", ".join(key for key in needed if key != "rngs")
    raise refuse(
        f"{name}({', '.join(parameters)}) cannot be called with `rngs` alone"
        + (f": it also needs {missing}" if missing else ""),
        rule="an NNX model is given as a function of `rngs`, so that its parameters are born sharded",
        fix=f"lambda rngs: {name if name != '<lambda>' else 'MyNet'}(..., rngs=rngs)",
    )


def _parameters(factory) -> Mapping[str, inspect.Parameter]:
    """Returns a factory's unbound arguments, also of an NNX class, whose metaclass hides them."""
    bound = factory if isinstance(factory, partial) else partial(factory)
    if inspect.isclass(bound.func):
        bound = partial(bound.func.__init__, None, *bound.args, **bound.keywords)
    open_ = inspect.signature(bound).parameters
    return {key: parameter for key, parameter in open_.items() if key not in bound.keywords}


def _configure(model: nnx.Module, compute: Compute) -> nnx.Module:
    """Sets train mode, remat and dtype on every submodule."""
    model.train() if compute.train else model.eval()
    module: Any
    for _, module in nnx.iter_modules(model):
        if is_policy(getattr(module, "remat", None)):
            module.remat = compute.remat
    if compute.dtype is not None:
        compute_nnx(model, compute.dtype)
    return model


def _words(path) -> tuple[str, ...]:
    """Splits a path into words; a key with a "/", as in an `nnx.Dict`, becomes several words."""
    return tuple(word for key in path for word in str(key).split("/"))


def _fill_variable(values: Tree, path, variable: object) -> Any:
    """Returns a variable, or an array that is an attribute, with its value."""
    value = pick(values, _words(path))
    return variable.replace(value) if isinstance(variable, nnx.Variable) else value


def _values(state: nnx.State) -> Tree:
    return nest({_words(path): _array(path, variable) for path, variable in nnx.to_flat_state(state)})


def _array(path, variable):
    value = variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable  # as stored, not as read
    if not hasattr(value, "shape"):
        raise refuse(
            f"{'/'.join(_words(path))} holds {type(value).__name__}",
            rule="every variable of a model holds one array",
            fix="jnp.asarray(...) around a number; an nnx.Param or nnx.Variable for each of several arrays",
        )
    return value


def _leaves(
    state: nnx.State, name: str, flat: Mapping[tuple, tuple[int, ...]], specs: Mapping[str, Spec | None]
) -> dict[str, Leaf]:
    """Returns path to `Leaf` for every array of a state; `specs` are the ones that the author gave to values."""
    leaves: dict[str, Leaf] = {}
    for keys, variable in nnx.to_flat_state(state):
        path = "/".join(_words(keys))
        if path in leaves:
            raise refuse(f"{name} has {path} twice", rule="a parameter has a path of its own", fix='names without "/"')
        leaves[path] = _leaf(keys, variable, flat.get(keys, ()), specs.get(path))
    above = {
        "/".join(words[:depth]): path
        for path in leaves
        for words in [path.split("/")]
        for depth in range(1, len(words))
    }
    if conflicts := sorted(leaves.keys() & above):
        raise refuse(
            f"{name} has {conflicts[0]}, and {above[conflicts[0]]} within it",
            rule='a path leads to an array or to others: the "/" in a key of nnx.Dict leads one deeper',
            fix='names without "/"',
        )
    return leaves


def _leaf(path, variable, flat: tuple[int, ...], spec: Spec | None) -> Leaf:
    value, is_variable = _array(path, variable), isinstance(variable, nnx.Variable)
    metadata = variable.get_metadata() if is_variable else {}
    names, rank = metadata_names("/".join(_words(path)), metadata), len(value.shape)
    axes = None if names is None else metadata_axes(names, metadata)
    if names is None and spec is not None:  # stacked dims come first: a `vmap` adds none to the spec
        names = axes = (*(None,) * (rank - len(spec)), *spec)
    fit_rank = lambda names: None if names is None else fit_names(names, rank, flat)  # noqa: E731
    return Leaf(tuple(value.shape), value.dtype, fit_rank(names), constant=not is_variable, axes=fit_rank(axes))


def metadata_names(path: str, metadata: Mapping[str, object]) -> tuple | None:
    """Returns the names of a parameter's dims in the metadata of an NNX variable; None if it has none.

    Raises:
      JaxparError: If the metadata names the dims of its optimizer state differently.
    """
    annotations = {key: tuple(_spec(names)) for key in _NAMES if (names := metadata.get(key))}
    param_names = annotations.get("out_sharding")
    for key in _NAMES[1:]:
        if annotations.get(key, param_names) != param_names:
            raise refuse(
                f"{path} has {key}={annotations[key]}, and out_sharding={param_names}",
                rule="what an optimizer keeps of a parameter is split as that is, and over `fsdp` from zero=1 on",
                fix=f"leave {key} out, and zero=1 or 2 where the optimizer alone is to be split",
            )
    return param_names


def metadata_axes(names: Sequence, metadata: Mapping[str, Any]) -> tuple | None:
    """Maps an NNX variable's names of dims to mesh axes by the author's rules; None without rules."""
    rules = metadata.get("sharding_rules")
    return tuple(spmd.from_sharding_rules(tuple(names), rules)) if rules else None


def _spec(names: object) -> Any:
    """Returns the entries of a NamedSharding, a Format, a PartitionSpec or a tuple, as names."""
    return getattr(getattr(names, "sharding", names), "spec", names)


_NAMES = ("out_sharding", "optimizer_sharding", "opt_sharding")  # a NamedSharding, a PartitionSpec or a plain tuple
