"""Infers the dims of a model's unannotated parameters: from their use if the model is traced, else from their paths."""

import math
from collections.abc import Mapping

from jaxpar.sharding.infer_names.from_words import InferredDims, infer_by_words
from jaxpar.sharding.names import Blueprint

CUT = {"heads", "mlp", "vocab", "channels"}
# A table whose features no matrix reads, as in word2vec: no parameter pairs with its rows.
TABLE = ("vocab", None)
# Matrices that pair with no other stay whole, as Megatron-LM leaves the pooler of BERT, if together they have at most
# this share of the entries of a model's matrices. If they have more, as an LSTM next to attention, they are split by
# size: that sends their results, but unsplit every device of `tensor` would compute all of them.
UNPAIRED = 1 / 20


def infer_dims(blueprint: Blueprint, *, use: bool) -> dict[str, InferredDims]:
    """Infers the dims of the parameters whose dims the model does not name.

    Args:
      blueprint: The model.
      use: Whether to trace the model; needed if an axis splits matrices, since otherwise only stacks matter.
    """
    words = infer_by_words(blueprint.other_leaves) | infer_by_words(blueprint.leaves)
    if not use or blueprint.program is None or all(leaf.names is not None for leaf in blueprint.leaves.values()):
        return words
    from jaxpar.sharding.infer_names.from_use import infer_by_use  # models whose dims have names do not load it

    closed, paths = blueprint.program()
    used = infer_by_use(closed.jaxpr, paths)
    if not any(CUT & {*dims.names} for dims in used.values() if dims.names != TABLE):
        return words  # e.g. an LSTM: its matrices are then split by size
    unpaired = _matrices_without_pair(used)
    return words | {
        path: dims for path, dims in used.items() if path not in unpaired and _choose_inference(dims, words.get(path))
    }


def _matrices_without_pair(used: Mapping[str, InferredDims]) -> set[str]:
    """Returns the matrices in which no dim may be split by its use; the empty set if they are a small share of all."""
    sizes = {path: math.prod(dims.pieces) for path, dims in used.items() if _is_matmul_weight(dims)}
    unpaired = {path for path in sizes if not CUT & {*used[path].names}}
    return unpaired if sum(sizes[path] for path in unpaired) > UNPAIRED * sum(sizes.values()) else set()


def _is_matmul_weight(read: InferredDims) -> bool:
    """Whether a parameter multiplies activations: matmuls produce or contract each of its dims."""
    layer_names = read.names[read.names[:1] == ("layers",) :]
    return read.followed and len(layer_names) > 1 and None not in layer_names


def _choose_inference(used: InferredDims, named: InferredDims | None) -> bool:
    """Whether inference from use is better than from words: not if only words find heads or mlp, or a use is unknown.

    Heads may be split even if a norm over all heads mixes them: it costs only a small all-reduce.
    """
    if (CUT | {"expert"}) & {*used.names}:
        return True
    return used.followed and (named is None or not (CUT - {"vocab"}) & {*named.names})
