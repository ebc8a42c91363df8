"""Names of dims by the field's usual words for layers, and by the shapes around them: for models without a program.

A kernel of [embed, heads, head_dim] looks like a stack of kernels [embed, heads]. It is one where its siblings say so:
in a stack all parameters have as many entries in dim 0, also those that can only have it as a dim too many.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

from jaxpar.sharding.names import Leaf
from jaxpar.sharding.reading.use import Read

_IN = r"(query|key|value|[qkv]|[qkv]_proj|(query|key|value)_proj)"
_OUT = r"(out|o|o_proj|out_proj)"
_UP = r"(up|gate|wi|wi_0|wi_1|w1|w3|fc1|up_proj|gate_proj|linear1)"
_DOWN = r"(down|wo|w2|fc2|down_proj|linear2)"
_W = r"/(kernel|w|weight)"
# Ends of paths (a regular expression each) and names for all dims but that of a stack. The first with as many is taken.
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
    # Gemma, as DeepMind, Flax and big_vision have it
    (r"q_einsum" + _W, ("heads", "embed", "head_dim")),
    (r"(kv|qkv)_einsum" + _W, (None, "heads", "embed", "head_dim")),
    (r"(attn_vec|out|o)_einsum" + _W, ("heads", "head_dim", "embed")),
    (r"mlp/gating_einsum", (None, "embed", "mlp")),
    (r"mlp/linear", ("mlp", "embed")),
    (r"\w*(embed|token|wte)\w*/embedding", ("vocab", "embed")),
    (r"(input_embedding|input_emb)(_table)?", ("vocab", "embed")),
    (r"(lm_head|logits|unembed)" + _W, ("embed", "vocab")),
)


def by_words(leaves: Mapping[str, Leaf]) -> dict[str, Read]:
    """Returns the dims of the parameters whose paths have a known end."""
    stacks = _stacks(leaves)
    found = {}
    for path, leaf in leaves.items():
        stacked = any(path.startswith(scope) for scope in stacks)
        names = _named(path, len(leaf.shape) - stacked)
        if names is None:
            continue
        names = ("layers",) * stacked + names
        if names[-3:] in (("embed", "heads", "head_dim"), ("heads", "embed", "head_dim")):
            names = (*names[:-3], *_in_order(leaf.shape[-3:]))
        why = "path like " + "/".join(path.split("/")[-2:])
        found[path] = Read(names=names, pieces=leaf.shape, why=why)
    return found


def _named(path: str, rank: int) -> tuple[str | None, ...] | None:
    return next(
        (names for pattern, names in WORDS if len(names) == rank and re.search(rf"(^|/){pattern}$", path)), None
    )


def _in_order(shape: tuple[int, ...]) -> tuple[str, str, str]:
    """Returns which of the first two dims of a projection to heads is the stream: the wider one."""
    return ("embed", "heads", "head_dim") if shape[0] >= shape[1] else ("heads", "embed", "head_dim")


def _stacks(leaves: Mapping[str, Leaf]) -> set[str]:
    """Returns the modules whose parameters are stacked: all have as many entries in dim 0, some a dim too many."""
    inside: dict[str, list[tuple[str, Leaf]]] = defaultdict(list)
    for path, leaf in leaves.items():
        words = path.split("/")
        for depth in range(1, len(words)):
            inside["/".join(words[:depth]) + "/"].append((path, leaf))
    return {
        scope
        for scope, within in inside.items()
        if len(within) > 1
        and all(leaf.shape[:1] == within[0][1].shape[:1] for _, leaf in within)
        and any(_too_many(path, len(leaf.shape)) for path, leaf in within)
    }


def _too_many(path: str, rank: int) -> bool:
    """Returns whether a parameter has a dim more than one of its kind has, and can be nothing else."""
    if re.search(r"(^|[/_])(bias|scale|beta|gamma)$", path):
        return rank > 1 and not re.search(_IN + "/bias$", path)
    if re.search(rf"(^|/){_OUT}{_W}$", path):
        return rank > 2  # [heads, head_dim, embed] has another dim 0 than its siblings
    return _named(path, rank) is None and _named(path, rank - 1) is not None
