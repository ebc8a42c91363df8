"""Wrappers of an optimizer: some parameters are frozen, schedules count steps, and layers of a stack update separately.

Frozen parameters have no state, and stay bitwise unchanged. A step sees that nothing reads their gradients, so it
neither computes nor sends them:

    freeze(optax.adamw(3e-4), ["embed", "blocks/0*"])
    freeze(optax.adamw(3e-4), ["*"], but=["head"])       trains only the head

Schedules count steps, even if a step makes several updates:

    step      0                     1
    updates   0  1  2  ...  U - 1   U  U + 1  ...
    rate      that of step 0        that of step 1

Optax counts the calls of a chain. Asynchronous updates (without a pipeline flush) call it after every microbatch or
two, so a warm-up or decay would end after 1/U of a run. Instead, schedules are paused during a step and advance by one
at its end. So the learning rates are the same as with a flush, and a run can continue with one. Other counts, such as
that of Adam's bias correction, still count updates.

Layers of a stack update separately if the optimizer's rule uses norms or other functions of a parameter:

    blocks/w  [layers, embed, mlp]    lamb: one trust ratio per layer         jax.vmap of the optimizer over dim 0
    embed     [vocab, embed]          lamb: one trust ratio                   the optimizer

Optax treats an array as one parameter, so it would take one norm of all layers of a stack together. This makes no
difference for optimizers that treat each element separately, such as Adam, or all parameters as one, such as
D-Adaptation.

Sources: You et al. (2017), arXiv:1708.03888, algorithm 1; You et al. (2019), arXiv:1904.00962, algorithm 2.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from optax.schedules import InjectStatefulHyperparamsState

from jaxpar.errors import JaxparError, refuse
from jaxpar.optim.muon import STACKS, Names
from jaxpar.optim.patterns import as_patterns, matching, unmatched

_COUNTS = (optax.ScaleByScheduleState, InjectStatefulHyperparamsState, optax.contrib.ScheduleFreeState)
# optax optimizers that take a norm, a root mean square, a maximum or singular vectors of an array
LAYERWISE = ("adafactor", "fromage", "galore", "lamb", "lars", "novograd", "sm3")


def check_optimizer_type(optimizer: object, got: str) -> None:
    """Checks that an optimizer is an optax chain.

    Args:
      optimizer: The optimizer.
      got: The argument as the error shows it.

    Raises:
      JaxparError: If it is none; for an optimizer's function, and for `optax.MultiSteps`, with the call that makes a
        chain of it.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        return
    from jaxpar.optim.optax_lookup import optimizers  # imported here: building a step does not need it

    fix, name = "optax.adamw(3e-4)", getattr(optimizer, "__name__", "")
    if optimizer is optax.MultiSteps or isinstance(optimizer, optax.MultiSteps):
        fix = "optax.MultiSteps(...).gradient_transformation()"
    elif name in optimizers() and getattr(optax, name, None) is optimizer:
        fix = f"optax.{name}(3e-4)"
    raise refuse(got, rule="an optimizer is an optax chain", fix=fix)


def freeze(
    optimizer: optax.GradientTransformation, paths: Iterable[str], *, but: Iterable[str] = ()
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to train all parameters except some; gradient clipping ignores frozen parameters.

    Args:
      optimizer: Any optax chain.
      paths: Patterns of frozen paths, such as `embed` or `blocks/0*`.
      but: Patterns of paths to train although `paths` match them.

    Raises:
      JaxparError: When its state is initialized, if a pattern matches no parameter or no parameter is trained.
    """
    check_optimizer_type(optimizer, f"freeze({optimizer!r:.60}, ...)")
    frozen, trained = as_patterns("freeze", paths), as_patterns("freeze, but", but)

    def labels(params):
        return label_params(params, frozen, trained)

    return optax.multi_transform({"trained": optimizer, "frozen": no_update()}, labels)


def label_params(params, frozen: tuple[str, ...], trained: tuple[str, ...]):
    """Labels each parameter "frozen" or "trained".

    Raises:
      JaxparError: If a pattern matches no parameter, or no parameter is trained.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves]
    if problems := [*unmatched("freeze", frozen, names), *unmatched("freeze, but", trained, names)]:
        raise JaxparError(*problems)
    frozen_paths = set(matching(names, frozen)) - set(matching(names, trained))
    if len(frozen_paths) == len(names):
        raise refuse(
            f"freeze = {list(frozen)} freezes all {len(names)} parameters",
            rule="a run trains at least one parameter",
            fix=f"fewer patterns; there are {', '.join(sorted({name.split('/')[0] for name in names}))}",
        )
    return jax.tree.unflatten(tree, ["frozen" if name in frozen_paths else "trained" for name in names])


def no_update() -> optax.GradientTransformation:
    """Makes all updates -0.0, since x + (-0.0) is x for every x, while -0.0 + 0.0 would be 0.0, another bit pattern."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, -0.0, leaf.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def pause_schedules(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps a chain so that its updates do not advance its schedules.

    It pauses the counts of optax's `scale_by_schedule` (which optax's optimizers use for `learning_rate=schedule`),
    of `inject_hyperparams`, and of `schedule_free`, whose count weights its average.
    """

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple[Any, Any]:
        updates, new = optimizer.update(updates, state, params)
        return updates, _map_counts(lambda _, before: before, new, state)

    return optax.GradientTransformation(optimizer.init, update)


def advance_schedules(state: optax.OptState) -> Any:
    """Advances the schedules in the state of a chain by one step."""

    def one(count):
        return count + 1 if jnp.issubdtype(count.dtype, jnp.integer) else count

    return _map_counts(one, state)


def has_schedules(state: object) -> bool:
    """Whether the state of a chain, or its shapes, contains schedules that can be paused."""
    is_counted = lambda node: isinstance(node, _COUNTS)  # noqa: E731
    return any(map(is_counted, jax.tree.leaves(state, is_leaf=is_counted)))


def _map_counts(change: Callable, *states: Any) -> Any:
    """Applies `change` to each schedule count of the first state, and the same counts of the other states."""

    def one(*nodes: Any) -> Any:
        first = nodes[0]
        if isinstance(first, optax.ScaleByScheduleState):
            return jax.tree.map(change, *nodes)
        if isinstance(first, optax.contrib.ScheduleFreeState):
            return first._replace(
                step_count=change(*(state.step_count for state in nodes)),
                base_optimizer_state=_map_counts(change, *(state.base_optimizer_state for state in nodes)),
            )
        if not isinstance(first, InjectStatefulHyperparamsState):
            return first
        return first._replace(
            count=change(*(state.count for state in nodes)),
            hyperparams_states=jax.tree.map(change, *(state.hyperparams_states for state in nodes)),
            inner_state=_map_counts(change, *(state.inner_state for state in nodes)),
        )

    return jax.tree.map(one, *states, is_leaf=lambda node: isinstance(node, _COUNTS))


def stack_dims(names: Names) -> dict[str, int]:
    """Maps the path of each stacked parameter to its number of leading dims that stack layers or experts."""
    counts = {path: sum(1 for _ in takewhile(lambda name: name in STACKS, dims or ())) for path, dims in names.items()}
    return {path: count for path, count in counts.items() if count}


def without_stack_dims(names: Callable[[], Names]) -> Callable[[], Names]:
    """Wraps `names` to omit the dims of stacks."""

    def inner() -> Names:
        dim_names = names()
        counts = stack_dims(dim_names)
        return {path: dims[counts.get(path, 0) :] if dims else dims for path, dims in dim_names.items()}

    return inner


def per_layer(
    optimizer: optax.GradientTransformation, names: Callable[[], Names]
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to update each layer of a stack as a separate parameter.

    The state has the optimizer's structure with the dims of the stack first, including counts: one per layer.

    Args:
      optimizer: Optimizer of one layer. Its masks get parameters without the dims of their stacks.
      names: Function that returns path to dim names; leading names in `STACKS` are dims of stacks.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> Any:
        groups = _groups(params, names)
        if not any(depth for _, depth, _ in groups):
            return inner.init(params)
        return {label: _vmap(inner.init, depth)(part) for label, depth, part in groups}

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any) -> tuple[Any, Any]:
        groups = _groups(updates, names)
        if not any(depth for _, depth, _ in groups):
            return inner.update(updates, state, params, **extra)
        new_updates, new_state = {}, {}
        weights = {label: part for label, _, part in _groups(params, names)} if params is not None else {}
        update_layer = partial(_update, inner, extra)
        for label, depth, part in groups:
            new_updates[label], new_state[label] = _vmap(update_layer, depth)(part, state[label], weights.get(label))
        return _join(updates, new_updates, names), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _update(
    inner: optax.GradientTransformationExtraArgs,
    extra: Mapping[str, object],
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
) -> tuple[Any, Any]:
    return inner.update(grads, state, params, **extra)


def _vmap(function: Callable, depth: int) -> Callable:
    for _ in range(depth):
        function = jax.vmap(function)
    return function


def _labels(tree: object, names: Callable[[], Names]) -> Any:
    """Labels each array with the sizes of its stacks, or "one"; one `vmap` updates all arrays with the same label."""
    counts = stack_dims(names())

    def label(keys: KeyPath, leaf: jax.Array) -> str:
        depth = counts.get(jax.tree_util.keystr(keys, simple=True, separator="/"), 0)
        return "x".join(map(str, leaf.shape[:depth])) if depth else "one"

    return jax.tree_util.tree_map_with_path(label, tree)


def _groups(tree: object, names: Callable[[], Names]) -> list[tuple[str, int, Any]]:
    """Returns (label, number of stack dims, tree of the arrays with this label) for each label."""
    labels = _labels(tree, names)
    groups = []
    for label in sorted(set(jax.tree.leaves(labels))):
        part = jax.tree.map(lambda key, leaf, label=label: leaf if key == label else optax.MaskedNode(), labels, tree)
        groups.append((label, 0 if label == "one" else label.count("x") + 1, part))
    return groups


def _join(tree: object, parts: Mapping[str, object], names: Callable[[], Names]) -> Any:
    """Returns a tree like `tree` that takes each array from the tree of its label."""
    labels, structure = jax.tree.flatten(_labels(tree, names))
    leaves = {label: iter(jax.tree.leaves(part)) for label, part in parts.items()}
    return jax.tree.unflatten(structure, [next(leaves[label]) for label in labels])
