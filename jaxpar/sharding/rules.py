"""Names of dims become mesh axes; parameters without names get some from their path.

    ("embed", "mlp")  ──rules──►  P(None, "tensor")
    no names          ──path───►  names by Flax's and the field's usual words for layers
                      ──else───►  the largest dim that the axis divides

Every choice is kept as a sentence, so that `explain` can show it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from jaxpar.errors import Problem
from jaxpar.mesh.axes import AXES, batch_axes
from jaxpar.sharding.names import Leaf

Axes = str | tuple[str, ...] | None

# Names that no axis splits by itself.
WHOLE = ("keys", "embed", "head_dim", "kernel", "classes", "norm")  # keys: the sequence that every query looks at


def names_of_dims(sizes: Mapping[str, int]) -> dict[str, Axes]:
    """Returns names of dims to the axes of a mesh that split them, as `jaxpar.mesh.axes.AXES` says.

    What a dim is called decides what it is split over: Megatron-LM's column and row pairs (Shoeybi et al. 2019,
    arXiv:1909.08053) in the names that Flax, MaxText and T5X use for dims.
    """
    # Inner axes first: of two dims that ask for one axis, the name that comes first has it. Under sequence parallelism
    # `seq` asks for `tensor` too, and must leave it to the heads or the mlp of an activation that has both.
    inner_first = reversed(AXES.values())
    split = {dim: axis.name for axis in inner_first for dim in axis.splits if axis.name in sizes}
    return {"batch": batch_axes(sizes), **split, **dict.fromkeys(WHOLE)}


# Ends of paths (a regular expression each) and names for the trailing dims, for models without names.
# The first that matches with as many dims, or one more in front (stacked layers), is taken.
PATHS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(query|key|value)/kernel", ("embed", "heads", "head_dim")),
    (r"(query|key|value|[qkv]|[qkv]_proj)/kernel", ("embed", "heads")),
    (r"(query|key|value|[qkv]|[qkv]_proj)/bias", ("heads",)),
    (r"(out|o)/kernel", ("heads", "head_dim", "embed")),
    (r"(o|o_proj|out_proj)/kernel", ("heads", "embed")),
    (r"(up|gate|wi|wi_0|wi_1|w1|w3|fc1|up_proj|gate_proj|linear1)/kernel", ("embed", "mlp")),
    (r"(up|gate|wi|wi_0|wi_1|w1|w3|fc1|up_proj|gate_proj|linear1)/bias", ("mlp",)),
    (r"(down|wo|w2|fc2|down_proj|linear2)/kernel", ("mlp", "embed")),
    (r"\w*(embed|token|wte)\w*/embedding", ("vocab", "embed")),
    (r"(lm_head|logits|unembed)/kernel", ("embed", "vocab")),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The mesh axes of one parameter's dims, before ZeRO adds its axis.

    Attributes:
      names: The names of the dims, given or found.
      axes: Per dim, the mesh axes it is split over, outermost first.
      why: The rule that said so.
    """

    names: tuple[str | None, ...]
    axes: tuple[tuple[str, ...], ...]
    why: str


def spec_of(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Returns the `PartitionSpec` of per-dim axes, without trailing Nones."""
    entries = [None if not a else a[0] if len(a) == 1 else tuple(a) for a in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def resolve(
    path: str, leaf: Leaf, sizes: Mapping[str, int], *, names: Mapping[str, Axes], paths: Mapping[str, Sequence[str]]
) -> tuple[Choice, list[Problem]]:
    """Returns where one parameter's dims go, and what is wrong with that.

    Args:
      path: Such as `blocks/attention/query/kernel`.
      leaf: Its shape and the names the model gave its dims.
      sizes: Mesh axis to size.
      names: Dim name to mesh axes, first come first served within a parameter.
      paths: The user's own patterns (end of path) to names of the trailing dims.
    """
    given, why = _named(path, leaf, paths)
    if isinstance(given, Problem):
        return Choice((None,) * len(leaf.shape), ((),) * len(leaf.shape), why), [given]
    if given is None:
        return _largest(path, leaf, sizes), []
    found = why.startswith("path")
    axes: list[tuple[str, ...]] = []
    taken: set[str] = set()
    problems = []
    for dim, (name, size) in enumerate(zip(given, leaf.shape, strict=True)):
        # an axis splits an array once: of two dims that ask for it the first has it (a square matrix named twice)
        wanted = tuple(axis for axis in _axes_of(name, names) if sizes.get(axis, 1) > 1 and axis not in taken)
        ways = 1
        for axis in wanted:
            ways *= sizes[axis]
        if size % ways:
            if found:  # jaxpar's own guess does not bind: leave the dim whole and say so
                why, wanted = f"{why}; {name}={size} not divisible by {'x'.join(wanted)}={ways}", ()
            else:
                problems.append(_indivisible(path, leaf, dim, name, wanted, ways))
                wanted = ()
        taken.update(wanted)
        axes.append(wanted)
    return Choice(tuple(given), tuple(axes), why), problems


def name_stacks(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Returns the leaves with dim 0 named `layers` wherever a stack is only partly annotated.

    Biases and norms often carry no names. Where a matrix of the same module says that its dim 0
    is `layers`, the unnamed parameters of that module with as many entries in dim 0 are stacked too.
    """
    stacks: dict[str, int] = {}
    for path, leaf in leaves.items():
        if leaf.names and leaf.names[0] == "layers":
            words = path.split("/")
            stacks |= {"/".join(words[:depth]) + "/": leaf.shape[0] for depth in range(1, len(words))}
    return {
        path: replace(leaf, names=("layers", *(None,) * (len(leaf.shape) - 1)))
        if leaf.names is None
        and leaf.shape
        and any(path.startswith(s) and leaf.shape[0] == n for s, n in stacks.items())
        else leaf
        for path, leaf in leaves.items()
    }


def _axes_of(name, names: Mapping[str, Axes]) -> tuple[str, ...]:
    if isinstance(name, (tuple, list)):  # P(("data", "fsdp"), None): several mesh axes on one dim
        return tuple(axis for part in name for axis in _axes_of(part, names))
    axes = names.get(name, name if name in AXES else None) if name else None
    return () if not axes else (axes,) if isinstance(axes, str) else tuple(axes)


def _named(path: str, leaf: Leaf, paths: Mapping[str, Sequence[str]]):
    """Returns the names of all dims and where they come from; None where nothing names them."""
    rank = len(leaf.shape)
    for pattern, names in paths.items():
        if re.search(rf"(^|/)(?:{pattern})$", path):
            if len(names) > rank:
                return Problem(
                    f"rule {pattern!r} names {len(names)} dims of {path}, which has shape {list(leaf.shape)}",
                    rule="a path rule names the trailing dims of the parameters it matches",
                    fix=f"name {rank} dims or fewer",
                ), "your path rule"
            return (None,) * (rank - len(names)) + tuple(name or None for name in names), f"your path rule {pattern!r}"
    if leaf.names is not None:
        if len(leaf.names) > rank:
            return Problem(
                f"{path} of shape {list(leaf.shape)} is annotated with {len(leaf.names)} names: {leaf.names}",
                rule="an annotation has one name for a dim",
                fix="one name (or None) per dim",
            ), "annotation"
        return leaf.names, "annotation"
    for pattern, names in PATHS:
        stacked = rank - len(names)
        if re.search(rf"(^|/){pattern}$", path) and (stacked == 0 or (stacked == 1 and len(names) > 1)):
            return ("layers",) * stacked + names, "path like " + "/".join(path.split("/")[-2:])
    return None, "largest dim"


def _largest(path: str, leaf: Leaf, sizes: Mapping[str, int]) -> Choice:
    """Returns `tensor` on the largest dim that it divides; vectors, also stacked ones, stay whole."""
    axes: list[tuple[str, ...]] = [()] * len(leaf.shape)
    ways, own = sizes.get("tensor", 1), own_dims(path, leaf)
    fitting = [dim for dim, size in enumerate(leaf.shape) if size % ways == 0 and size >= ways]
    why = "no names"
    # a vector is cheap to keep whole, and split it would put a collective around every elementwise op that adds it
    if ways > 1 and own > 1 and fitting:
        why = "no names: tensor on the largest dim"
        axes[max(fitting, key=lambda dim: (dim >= len(leaf.shape) - own, leaf.shape[dim], dim))] = ("tensor",)
    return Choice((None,) * len(leaf.shape), tuple(axes), why)


def own_dims(path: str, leaf: Leaf) -> int:
    """Returns how many trailing dims an unnamed parameter probably has of its own; dims before them may be stacks."""
    vector = re.search(r"(^|[/_])(bias|scale|beta|gamma)$", path)
    return min(len(leaf.shape), 1 if vector else 2)


def _indivisible(path, leaf: Leaf, dim, name, wanted, ways) -> Problem:
    size = leaf.shape[dim]
    would = [n for n in range(ways - 1, 0, -1) if size % n == 0][:1] or [1]
    up = -(-size // ways) * ways
    return Problem(
        f"{path}: dim {dim} ({name}) of {list(leaf.shape)} has {size} entries, {' x '.join(wanted)} is {ways}",
        rule="an axis divides every dim it splits",
        fix=f"a dim of {up} in the model, {wanted[-1]}={would[0]}, or leave that dim whole: rules {{{name!r}: None}}",
    )
