"""Infers the dims of a model's unannotated parameters: from their use if the model is traced, else from their paths.

The trace is one call of the model on abstract inputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax

from jaxpar.models.islands import use_islands
from jaxpar.sharding.author.explicit import no_mesh, sharding_translation
from jaxpar.sharding.infer_names.from_words import InferredDims, infer_by_words
from jaxpar.sharding.names import Blueprint, Compute, Program, Tree, format_path
from jaxpar.sharding.nnx_hooks import step_hooks

CUT = {"heads", "mlp", "vocab", "channels"}
# A table whose features no matrix reads, as in word2vec: no parameter pairs with its rows.
TABLE = ("vocab", None)
# Matrices that pair with no other stay whole, as Megatron-LM leaves the pooler of BERT, if together they have at most
# this share of the entries of a model's matrices. If they have more, as an LSTM next to attention, they are split by
# size: that sends their results, but unsplit every device of `tensor` would compute all of them.
UNPAIRED_SHARE = 1 / 20


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
    return unpaired if sum(sizes[path] for path in unpaired) > UNPAIRED_SHARE * sum(sizes.values()) else set()


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


def trace_program(init: Callable, bind: Callable, call: Callable[[Any], Any]) -> Program:
    """Returns the jaxpr of a call, and the paths of the parameters, which are its first arguments.

    Args:
      init: `Blueprint.init`.
      bind: `Blueprint.bind`.
      call: Calls a model once, in the way that the loss will.
    """

    def program(values: Tree, state: Tree) -> None:
        call(bind(values, state, lambda _, value: value, Compute()))

    from jaxpar.models.experts import active_experts  # loaded only where a model is traced

    with sharding_translation(), step_hooks(), no_mesh():
        values, state = jax.eval_shape(init, jax.random.key(0))
        paths = tuple(format_path(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(values)[0])
        # all experts in one matmul: in a loop over them, a stack of experts would look like a stack of layers
        with use_islands({"mixture": active_experts}):
            return jax.make_jaxpr(program)(values, state), paths


def with_program(blueprint: Blueprint, call: Callable[[Any], Any]) -> Blueprint:
    """Attaches a lazily traced program (one call on abstract inputs) to the blueprint, unless it has one."""
    if blueprint.program is not None:
        return blueprint
    return replace(blueprint, program=cache(lambda: trace_program(blueprint.init, blueprint.bind, call)))


def zeros_like_input(example: Any) -> Any:
    """Returns zeros for an array, or for anything with shape and dtype; other values unchanged."""
    if not (hasattr(example, "shape") and hasattr(example, "dtype")):
        return example
    if jax.numpy.issubdtype(example.dtype, jax.dtypes.prng_key):
        return jax.numpy.broadcast_to(jax.random.key(0), example.shape)
    return jax.numpy.zeros(example.shape, example.dtype)
