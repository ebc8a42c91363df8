"""Infers names of dims from usual layer names and the shapes of sibling parameters, for models that are not traced.

A kernel of [embed, heads, head_dim] looks like a stack of kernels [embed, heads]. It is a stack only if all parameters
of the module have the same dim 0, and some of them, such as biases, have one dim more than usual.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.sharding.names import Leaf


@dataclass(frozen=True, slots=True)
class InferredDims:
    """Inferred dims of an unannotated parameter.

    Attributes:
      names: The name of each dim, or None.
      pieces: Per dim, the largest number of shards: for a dim of heads x head_dim, the number of heads.
      why: The evidence, as text.
      followed: Whether every use of the parameter is known; if so, a dim without a name certainly may not be split.
    """

    names: tuple[str | None, ...]
    pieces: tuple[int, ...]
    why: str
    followed: bool = False


_IN = r"(query|key|value|[qkv]|[qkv]_proj|(query|key|value)_proj)"
_OUT = r"(out|o|o_proj|out_proj)"
_UP = r"(up|gate|wi|wi_0|wi_1|w1|w3|fc1|up_proj|gate_proj|linear1)"
_DOWN = r"(down|wo|w2|fc2|down_proj|linear2)"
_W = r"/(kernel|w|weight)"
# Ends of paths (regular expressions), with names of all dims but that of a stack. The first of matching rank is taken.
WORDS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (_IN + _W, ("embed", "heads", "head_dim")),
    (_IN + _W, ("embed", "heads")),
    (_IN + "/bias", ("heads",)),
    (_IN + "/bias", ("heads", "head_dim")),
    (_OUT + _W, ("heads", "head_dim", "embed")),
    (_OUT + _W, ("heads", "embed")),
    (_UP + _W, ("embed", "mlp")),
    (_UP + "/bias", ("mlp",)),
    (_DOWN + _W, ("mlp", "embed")),
    # Gemma, in the code of DeepMind, Flax and big_vision
    (r"q_einsum" + _W, ("heads", "embed", "head_dim")),
    (r"(kv|qkv)_einsum" + _W, (None, "heads", "embed", "head_dim")),
    (r"(attn_vec|out|o)_einsum" + _W, ("heads", "head_dim", "embed")),
    (r"mlp/gating_einsum", (None, "embed", "mlp")),
    (r"mlp/linear", ("mlp", "embed")),
    (r"\w*(embed|token|wte)\w*/embedding", ("vocab", "embed")),
    (r"(input_embedding|input_emb)(_table)?", ("vocab", "embed")),
    (r"(lm_head|logits|unembed)" + _W, ("embed", "vocab")),
)


def infer_by_words(leaves: Mapping[str, Leaf]) -> dict[str, InferredDims]:
    """Infers the dims of the parameters whose paths end in a known word."""
    stacks = _stacks(leaves)
    reads = {}
    for path, leaf in leaves.items():
        stacked = any(path.startswith(scope) for scope in stacks)
        names = _match_words(path, len(leaf.shape) - stacked)
        if names is None:
            continue
        names = ("layers",) * stacked + names
        if names[-3:] in (("embed", "heads", "head_dim"), ("heads", "embed", "head_dim")):
            names = (*names[:-3], *_heads_projection(leaf.shape[-3:]))
        why = "path like " + "/".join(path.split("/")[-2:])
        reads[path] = InferredDims(names=names, pieces=leaf.shape, why=why)
    return reads


def _match_words(path: str, rank: int) -> tuple[str | None, ...] | None:
    return next(
        (names for pattern, names in WORDS if len(names) == rank and re.search(rf"(^|/){pattern}$", path)), None
    )


def _heads_projection(shape: tuple[int, ...]) -> tuple[str, str, str]:
    """Names the dims of a projection to heads: the wider of its first two dims is the residual stream."""
    return ("embed", "heads", "head_dim") if shape[0] >= shape[1] else ("heads", "embed", "head_dim")


def _stacks(leaves: Mapping[str, Leaf]) -> set[str]:
    """Returns the modules whose parameters are stacked: all have the same dim 0, and some have an extra dim."""
    members: dict[str, list[tuple[str, Leaf]]] = defaultdict(list)
    for path, leaf in leaves.items():
        words = path.split("/")
        for depth in range(1, len(words)):
            members["/".join(words[:depth]) + "/"].append((path, leaf))
    return {
        scope
        for scope, entries in members.items()
        if len(entries) > 1
        and all(leaf.shape[:1] == entries[0][1].shape[:1] for _, leaf in entries)
        and any(_has_extra_dim(path, len(leaf.shape)) for path, leaf in entries)
    }


def _has_extra_dim(path: str, rank: int) -> bool:
    """Whether a parameter has one dim more than usual for its kind, with no explanation but a stack."""
    if re.search(r"(^|[/_])(bias|scale|beta|gamma)$", path):
        return rank > 1 and not re.search(_IN + "/bias$", path)
    if re.search(rf"(^|/){_OUT}{_W}$", path):
        return rank > 2  # [heads, head_dim, embed] has another dim 0 than its siblings
    return _match_words(path, rank) is None and _match_words(path, rank - 1) is not None
