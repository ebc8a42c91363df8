"""Maps names of dims to mesh axes; a parameter without names gets inferred ones, from its use or its path.

    ("embed", "mlp")  ──rules────►  P(None, "tensor")
    no names          ──infer────►  names by the parameter's use in the model, or by the usual layer names
                      ──else─────►  the largest dim that the axis divides; for a lookup table, its features

Every choice carries a sentence with its reason, which `explain` shows.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar.errors import Problem
from jaxpar.mesh.axes import AXES, batch_axes
from jaxpar.sharding.infer_names.from_words import InferredDims
from jaxpar.sharding.names import Leaf

Axes = str | tuple[str, ...] | None

# Bytes below which a parameter that `tensor` does not split is left whole: a collective for each would cost more time
# than its memory is worth.
SMALL = 2**19

ANNOTATION = "annotation"  # reason of a placement: the model itself names the dims
NO_RULES: Mapping[str, Axes] = MappingProxyType({})

# Names that no axis splits by default. keys: the sequence that every query attends to
WHOLE = ("keys", "embed", "vocab_table", "head_dim", "kernel", "classes", "norm")


def axes_by_dim_name(sizes: Mapping[str, int]) -> dict[str, Axes]:
    """Maps each name of a dim to the mesh axes that split it, by `jaxpar.mesh.axes.AXES`.

    The rules are Megatron-LM's pairs of column-split and row-split matrices (Shoeybi et al. 2019, arXiv:1909.08053),
    in the names that Flax, MaxText and T5X use for dims.
    """
    # Inner axes first: if two dims want one axis, the name that comes first gets it. Under sequence parallelism `seq`
    # wants `tensor` too, and must leave it to the heads or the mlp of an activation that has both.
    inner_first = reversed(AXES.values())
    split = {dim: axis.name for axis in inner_first for dim in axis.splits if axis.name in sizes}
    return {"batch": batch_axes(sizes), **split, **dict.fromkeys(WHOLE)}


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """The mesh axes of one parameter's dims, before ZeRO adds its axis.

    Attributes:
      names: The names of the dims, annotated or inferred.
      axes: Per dim, the mesh axes that split it, outermost first.
      why: The rule that chose them.
      read_and_stored_axes: (axes of the parameter when the model reads it, axes when it is stored), if they differ: if
        an axis does not divide the dim that it should split, or if the parameter has no dim that it should split.
    """

    names: tuple[str | None, ...]
    axes: tuple[tuple[str, ...], ...]
    why: str
    read_and_stored_axes: tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]] | None = None


def to_spec(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Returns the `PartitionSpec` of per-dim axes, without trailing Nones."""
    entries = [None if not a else a[0] if len(a) == 1 else tuple(a) for a in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def choose_axes(
    path: str,
    leaf: Leaf,
    sizes: Mapping[str, int],
    *,
    names: Mapping[str, Axes],
    paths: Mapping[str, Sequence[str]],
    rules: Mapping[str, Axes] = NO_RULES,
    read: InferredDims | None = None,
) -> tuple[AxisChoice, list[Problem]]:
    """Chooses the mesh axes of one parameter's dims; returns the choice and its problems.

    The user's rules come first, then those of the model's author, then jaxpar's own names.

    Args:
      path: Its path, such as `blocks/attention/query/kernel`.
      leaf: Its shape, and the names that the model gives its dims.
      sizes: Mesh axis to size.
      names: Dim name to mesh axes; of two dims with the same axis, the first gets it.
      paths: The user's patterns for the ends of paths, to names of the trailing dims.
      rules: The user's rules; `names` includes them.
      read: Inferred dims, for a parameter that the model does not name.
    """
    dim_names, why = _name_dims(path, leaf, paths)
    if isinstance(dim_names, Problem):
        return AxisChoice((None,) * len(leaf.shape), ((),) * len(leaf.shape), why), [dim_names]
    if dim_names is None:
        if len(leaf.shape) > 3 and names.get("channels", "tensor") is None:  # a kernel, of whole channels by a rule
            return AxisChoice((None,) * len(leaf.shape), ((),) * len(leaf.shape), "whole channels, by a rule"), []
        return (_largest(path, leaf, sizes) if read is None else _inferred_axes(path, leaf, sizes, names, read)), []
    axes: list[tuple[str, ...]] = []
    used_axes: set[str] = set()
    problems = []
    by_author, ruled = leaf.axes if why == ANNOTATION else None, False
    for dim, (name, size) in enumerate(zip(dim_names, leaf.shape, strict=True)):
        word: Any = name
        # `layers` belongs to a pipeline, which the user declares
        if by_author and name != "layers" and not (isinstance(name, str) and name in rules):
            word, ruled = by_author[dim], ruled or by_author[dim] != name
            if word != name or dim_names == by_author:  # else the author's rules omit the name
                problems += _unknown_axes(path, dim, name, word, {*names, *sizes})
        # an axis splits an array once: of two dims that want it the first gets it (a square matrix named twice)
        wanted = tuple(axis for axis in resolve_axes(word, names) if sizes.get(axis, 1) > 1 and axis not in used_axes)
        ways = 1
        for axis in wanted:
            ways *= sizes[axis]
        if size % ways:
            problems.append(_indivisible(path, leaf, dim, name, wanted, ways))
            wanted = ()
        used_axes.update(wanted)
        axes.append(wanted)
    return AxisChoice(tuple(dim_names), tuple(axes), f"{why}, by rules of the model's own" if ruled else why), problems


def _unknown_axes(path: str, dim: int, name: object, word: object, known_names: set[str]) -> list[Problem]:
    """Returns a problem for each axis of the author's mesh that is neither an axis of the layout nor in its rules."""
    axes = word if isinstance(word, (tuple, list)) else (word,)
    unknown = [axis for axis in axes if isinstance(axis, str) and axis not in known_names]
    return [
        Problem(
            f"{path}: the model splits dim {dim} ({name}) over {axis!r}, which is no axis of the mesh",
            rule="an axis of the author's mesh is one of the layout's, or has a rule",
            fix=f'rules={{"{axis}": "tensor"}} in Parallel, or {{"{axis}": None}}',
        )
        for axis in unknown
    ]


def name_stacks(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Names dim 0 `layers` wherever a stack is only partly annotated.

    Biases and norms often carry no names. If a matrix of the same module names its dim 0 `layers`, the unnamed
    parameters of that module with the same dim 0 are stacked too.
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


def without_blank_names(leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """Drops the names of a model whose annotations name no dim at all.

    Authors who turn sharding off leave `P(None, None)` on every parameter. That says no more of a parameter than no
    annotation does, and dims are then inferred; in a model that names some dims, None means a whole dim.
    """
    if any(name for leaf in leaves.values() for name in leaf.names or ()):
        return leaves
    return {path: replace(leaf, names=None, axes=None) for path, leaf in leaves.items()}


def resolve_axes(name: Any, names: Mapping[str, Axes]) -> tuple[str, ...]:
    """Returns the mesh axes of a dim's name, of several names for one dim, or of an axis itself."""
    if isinstance(name, (tuple, list)):  # P(("data", "fsdp"), None): several mesh axes on one dim
        return tuple(axis for part in name for axis in resolve_axes(part, names))
    axes = names.get(name, name if name in AXES else None) if name else None
    return () if not axes else (axes,) if isinstance(axes, str) else tuple(axes)


def _name_dims(path: str, leaf: Leaf, paths: Mapping[str, Sequence[str]]):
    """Returns the names of all dims and their source; None if nothing names them."""
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
        return leaf.names, ANNOTATION
    return None, "largest dim"


def _inferred_axes(
    path: str, leaf: Leaf, sizes: Mapping[str, int], names: Mapping[str, Axes], read: InferredDims
) -> AxisChoice:
    """Maps inferred dims to axes; if an axis does not divide its dim, the parameter is stored split along another."""
    rank = len(leaf.shape)
    dim_names, pieces, why = read.names[-rank:] if rank else (), read.pieces[-rank:] if rank else (), read.why
    axes: list[tuple[str, ...]] = []
    padded: int | None = None
    for dim, (name, limit) in enumerate(zip(dim_names, pieces, strict=True)):
        used_axes = {axis for dim_axes in axes for axis in dim_axes}
        wanted = tuple(axis for axis in resolve_axes(name, names) if sizes.get(axis, 1) > 1 and axis not in used_axes)
        ways = math.prod(sizes[axis] for axis in wanted)
        if limit % ways:
            parts = f"{limit} groups of {name}" if name == "channels" else f"{limit} {name}"
            count = f"{name}={limit}" if limit == leaf.shape[dim] else parts
            why = f"{why}; {count} not divisible by {'x'.join(wanted)}={ways}"
            padded = dim if name == "vocab" and wanted == ("tensor",) else padded
            wanted = ()
        axes.append(wanted)
    choice = AxisChoice(dim_names, tuple(axes), why)
    cut = "tensor" in {axis for dim_axes in axes for axis in dim_axes}
    if sizes.get("tensor", 1) == 1 or cut or count_layer_dims(path, leaf) < 2 or not (read.followed or why != read.why):
        return choice
    return _store_over_tensor(leaf, choice, sizes["tensor"], padded)


def _store_over_tensor(leaf: Leaf, choice: AxisChoice, ways: int, padded: int | None) -> AxisChoice:
    """Shards the stored parameter over `tensor`, along its largest dim that the axis divides.

    The model reads it gathered. Of a vocabulary it instead reads shards, padded inside of the program, so that no two
    devices compute the same logits. The state keeps the model's shapes. For two layers of GPT-2 medium and 4,096
    tokens, compiled for `tensor` over eight H100s, this sends 99 MiB more than an unsharded table does (367 instead of
    268: 0.2 ms of NVLink) and computes 5.6 times less (239 GFLOP instead of 1,345: 2 ms of bf16). It pays off from a
    few hundred tokens per replica on.
    """
    fitting = [dim for dim, size in enumerate(leaf.shape) if size % ways == 0 and choice.names[dim] != "layers"]
    if not fitting or leaf.bytes < SMALL:
        return choice
    best = max(fitting, key=lambda dim: (leaf.shape[dim], dim))

    def add_tensor(dim: int | None) -> tuple[tuple[str, ...], ...]:
        return tuple((*axes, "tensor") if index == dim else axes for index, axes in enumerate(choice.axes))

    read = "gathered" if padded is None else f"cut along {choice.names[padded]} with padding"
    why = f"{choice.why}; stored over tensor along {choice.names[best] or leaf.shape[best]}, {read} where it is read"
    return replace(choice, why=why, read_and_stored_axes=(add_tensor(padded), add_tensor(best)))


def _largest(path: str, leaf: Leaf, sizes: Mapping[str, int]) -> AxisChoice:
    """Splits the largest dim that `tensor` divides, or the features of a lookup table; vectors stay unsharded."""
    axes: list[tuple[str, ...]] = [()] * len(leaf.shape)
    ways, own_rank = sizes.get("tensor", 1), count_layer_dims(path, leaf)
    fitting = [dim for dim, size in enumerate(leaf.shape) if size % ways == 0 and size >= ways]
    why = "no names"
    if leaf.shape[:1] == (1,):  # broadcast over examples, as in a bias: it is added to the stream, which is not split
        whole = AxisChoice((None,) * len(leaf.shape), tuple(axes), why)
        return whole if ways == 1 or own_rank < 2 else _store_over_tensor(leaf, whole, ways, None)
    # a vector is cheap to store whole; split, it would need a collective around every elementwise op that adds it
    if ways > 1 and own_rank > 1 and fitting:
        best = max(fitting, key=lambda dim: (dim >= len(leaf.shape) - own_rank, leaf.shape[dim], dim))
        why = "no names: tensor on the largest dim"
        if re.search("(^|/)embedding$", path) and len(leaf.shape) - 1 in fitting:
            # split by rows, the result would be summed over `tensor`, and every device would compute with all of it
            best, why = len(leaf.shape) - 1, "no names: tensor on the features of a table"
        axes[best] = ("tensor",)
    return AxisChoice((None,) * len(leaf.shape), tuple(axes), why)


def count_layer_dims(path: str, leaf: Leaf) -> int:
    """Guesses how many trailing dims of an unnamed parameter belong to one layer; earlier dims may be stacks."""
    vector = re.search(r"(^|[/_])(bias|scale|beta|gamma)$", path)
    return min(len(leaf.shape), 1 if vector else 2)


def _indivisible(path, leaf: Leaf, dim, name, wanted, ways) -> Problem:
    size = leaf.shape[dim]
    divisor = [n for n in range(ways - 1, 0, -1) if size % n == 0][:1] or [1]
    up = -(-size // ways) * ways
    decoder = " (padded_vocab of jp.DecoderConfig)" if name == "vocab" else ""
    return Problem(
        f"{path}: dim {dim} ({name}) of {list(leaf.shape)} has {size} entries, {' x '.join(wanted)} is {ways}",
        rule="an axis divides every dim it splits",
        fix=f"a dim of {up} in the model{decoder}, {wanted[-1]}={divisor[0]}, or leave that dim whole: "
        f"rules {{{name!r}: None}}",
    )


# Annotations with fewer names than their parameter has dims.
#
#     nn.DenseGeneral, kernel [embed, heads, head_dim], initialized as [embed, heads x head_dim]
#     ("embed", "kv")  ──►  ("embed", "kv", None)        of flat dims the outermost is split, as the flat one would be
#
# Flax's layers over several dims call their initializer with flat dims, so `nn.with_logical_partitioning` and
# `nnx.with_partitioning` annotate these: everywhere in `MultiHeadDotProductAttention`.

Names = tuple[str | None, ...]


def fit_names(names: Sequence[Any], rank: int, flat: Sequence[int] = ()) -> Names:
    """Returns one name, or None, for each dim of a parameter.

    Args:
      names: The annotated names. If they are fewer than the dims, the last dims have none, as in a `PartitionSpec`.
      rank: The number of dims.
      flat: For an initializer that was called with flat dims, the number of dims that each of the last names stands
        for; each dim before them, such as that of stacked layers, has its own name.

    >>> fit_names(("embed", "kv"), 3, (1, 2)), fit_names(("kv", "embed"), 3, (2, 1)), fit_names(("embed",), 2)
    (('embed', 'kv', None), ('kv', None, 'embed'), ('embed', None))
    """
    leading = len(names) - len(flat)
    if flat and leading >= 0 and leading + sum(flat) == rank:
        groups = [(name, *(None,) * (count - 1)) for name, count in zip(names[leading:], flat, strict=True)]
        return (*names[:leading], *(name for group in groups for name in group))
    return (*names, *(None,) * (rank - len(names)))


def flat_dims(inputs: int, outputs: int, batch: int) -> dict[str, tuple[int, ...]]:
    """Returns, for kernel and bias of a dense layer, the number of dims that each of their flat dims stands for.

    Args:
      inputs: Number of dims that the kernel contracts.
      outputs: Number of dims that the kernel produces.
      batch: Number of batch dims of the kernel.
    """
    return {"kernel": (batch + inputs, outputs), "bias": (batch + outputs,)}
