"""An optimizer that leaves some parameters as they are: they have no state, and keep their bits.

    freeze(optax.adamw(3e-4), ["embed", "blocks/0*"])
    freeze(optax.adamw(3e-4), ["*"], but=["head"])       trains the head alone

A step sees that nothing reads the gradients of these parameters, so it neither computes nor sends them.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import JaxparError, refuse
from jaxpar.optim.patterns import meant, unmatched


def freeze(
    optimizer: optax.GradientTransformation, paths: Iterable[str], *, but: Iterable[str] = ()
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that trains all parameters but these; what it clips is the norm of those that it trains.

    Args:
      optimizer: Any optax chain.
      paths: Patterns of paths that are frozen, such as `embed` or `blocks/0*`.
      but: Patterns of paths that are trained nevertheless.

    Raises:
      JaxparError: When its state is made, if a pattern matches no parameter, or nothing is left to train.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise refuse(f"freeze({optimizer!r:.60}, ...)", rule="an optimizer is an optax chain", fix="optax.adamw(3e-4)")
    frozen, trained = _patterns("paths", paths), _patterns("but", but)

    def labels(params):
        return labelled(params, frozen, trained)

    return optax.multi_transform({"trained": optimizer, "frozen": unchanged()}, labels)


def labelled(params, frozen: tuple[str, ...], trained: tuple[str, ...]):
    """Returns a tree with "frozen" or "trained" for each parameter.

    Raises:
      JaxparError: If a pattern matches no parameter, or nothing is left to train.
    """
    keyed, tree = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in keyed]
    if problems := [*unmatched("freeze", frozen, names), *unmatched("freeze, but", trained, names)]:
        raise JaxparError(*problems)
    held = set(meant(names, frozen)) - set(meant(names, trained))
    if len(held) == len(names):
        raise refuse(
            f"freeze = {list(frozen)} freezes all {len(names)} parameters",
            rule="a run trains at least one parameter",
            fix=f"fewer patterns; there are {', '.join(sorted({name.split('/')[0] for name in names}))}",
        )
    return jax.tree.unflatten(tree, ["frozen" if name in held else "trained" for name in names])


def unchanged() -> optax.GradientTransformation:
    """Returns a transformation whose updates change no bit: x + (-0.0) is x, while -0.0 + 0.0 is 0.0."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, -0.0, leaf.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _patterns(name: str, given: Iterable[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if wrong := [each for each in patterns if not isinstance(each, str)]:
        raise refuse(
            f"freeze({name}={wrong[0]!r:.60})", rule="a pattern of paths is text", fix='["embed", "blocks/0*"]'
        )
    return patterns
