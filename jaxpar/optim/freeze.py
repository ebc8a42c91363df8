"""An optimizer that freezes some parameters: they have no state, and stay bitwise unchanged.

    freeze(optax.adamw(3e-4), ["embed", "blocks/0*"])
    freeze(optax.adamw(3e-4), ["*"], but=["head"])       trains only the head

A step sees that nothing reads the gradients of frozen parameters, so it neither computes nor sends them.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import JaxparError, refuse
from jaxpar.optim.patterns import matching, unmatched


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
    if not isinstance(optimizer, optax.GradientTransformation):
        raise refuse(f"freeze({optimizer!r:.60}, ...)", rule="an optimizer is an optax chain", fix="optax.adamw(3e-4)")
    frozen, trained = _patterns("paths", paths), _patterns("but", but)

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


def _patterns(name: str, given: Iterable[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if invalid := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise refuse(
            f"freeze({name}={invalid[0]!r:.60})", rule="a pattern of paths is text", fix='["embed", "blocks/0*"]'
        )
    return patterns
