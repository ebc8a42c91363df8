"""Reads the dims of a model's bare parameters: by use where there is a program, else by words."""

import math
from collections.abc import Mapping

from jaxpar.sharding.names import Blueprint
from jaxpar.sharding.reading.use import Read, by_use
from jaxpar.sharding.reading.words import by_words

CUT = {"heads", "mlp", "vocab"}
# Of a table whose features meet no matrix, as in word2vec. Its rows pair with nothing.
TABLE = ("vocab", None)
# A matrix that pairs with no other stays whole, as Megatron-LM leaves the pooler of BERT, while all such have at most
# this part of the entries of a model's matrices. Where they have more, as an LSTM beside an attention, they are cut by
# their sizes: their results are then sent, but of whole ones every device of `tensor` would compute all.
UNPAIRED = 1 / 20


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
    if not any(CUT & {*each.names} for each in used.values() if each.names != TABLE):
        return words  # as of an LSTM: matrices are then cut by their sizes
    alone = _unpaired(used)
    return words | {path: each for path, each in used.items() if path not in alone and _better(each, words.get(path))}


def _unpaired(used: Mapping[str, Read]) -> set[str]:
    """Returns the matrices in which use finds no dim to be cut; none where they are few, which stay whole."""
    sizes = {path: math.prod(each.pieces) for path, each in used.items() if _multiplied(each)}
    alone = {path for path in sizes if not CUT & {*used[path].names}}
    return alone if sum(sizes[path] for path in alone) > UNPAIRED * sum(sizes.values()) else set()


def _multiplied(read: Read) -> bool:
    """Returns whether activations are multiplied by a parameter: each of its dims is made or contracted."""
    own = read.names[read.names[:1] == ("layers",) :]
    return read.followed and len(own) > 1 and None not in own


def _better(used: Read, named: Read | None) -> bool:
    """Returns whether use tells more than words: not if only words know of heads or mlp, or use could not be followed.

    Heads may be mixed by a norm over all of them: that costs a small all-reduce, and does not keep them from being cut.
    """
    if CUT & {*used.names}:
        return True
    return used.followed and (named is None or not (CUT - {"vocab"}) & {*named.names})
