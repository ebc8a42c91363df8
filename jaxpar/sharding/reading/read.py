"""Reads the dims of a model's bare parameters: by use where there is a program, else by words."""

from jaxpar.sharding.names import Blueprint
from jaxpar.sharding.reading.use import Read, by_use
from jaxpar.sharding.reading.words import by_words

CUT = {"heads", "mlp", "vocab"}


def read(blueprint: Blueprint, *, use: bool) -> dict[str, Read]:
    """Returns what is known of the dims of parameters that the model gives no names.

    Args:
      blueprint: The model.
      use: Whether to trace its program, for axes that cut matrices; without them only stacks matter.
    """
    words = by_words(blueprint.others) | by_words(blueprint.leaves)
    if not use or blueprint.program is None or all(leaf.names is not None for leaf in blueprint.leaves.values()):
        return words
    closed, paths = blueprint.program()
    used = by_use(closed.jaxpr, paths)
    if not any(CUT & {*each.names} for each in used.values()):  # as of an LSTM: matrices are then cut by their sizes
        return words
    return words | {path: each for path, each in used.items() if _better(each, words.get(path))}


def _better(used: Read, named: Read | None) -> bool:
    """Returns whether use tells more than words: not if only words know of heads or mlp, or use could not be followed.

    Heads may be mixed by a norm over all of them: that costs a small all-reduce, and does not keep them from being cut.
    """
    if CUT & {*used.names}:
        return True
    return used.followed and (named is None or not (CUT - {"vocab"}) & {*named.names})
