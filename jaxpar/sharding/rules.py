"""Names of dims become mesh axes; parameters without names get some from their use and their path.

    ("embed", "mlp")  ──rules────►  P(None, "tensor")
    no names          ──reading──►  names by what the model does with the parameter, or by words for layers
                      ──else─────►  the largest dim that the axis divides; the features of a table

Every choice is kept as a sentence, so that `explain` can show it.
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
from jaxpar.sharding.names import Leaf
from jaxpar.sharding.reading.use import Read

Axes = str | tuple[str, ...] | None

# Bytes below which a parameter that `tensor` does not cut is left whole: a collective for each would cost more time
# than its memory is worth.
SMALL = 2**19

ANNOTATION = "annotation"  # why a parameter is placed as it is: the model names its dims
NO_RULES: Mapping[str, Axes] = MappingProxyType({})

# Names that no axis splits by itself. keys: the sequence that every query looks at
WHOLE = ("keys", "embed", "vocab_table", "head_dim", "kernel", "classes", "norm")


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The mesh axes of one parameter's dims, before ZeRO adds its axis.

    Attributes:
      names: The names of the dims, given or found.
      axes: Per dim, the mesh axes it is split over, outermost first.
      why: The rule that said so.
      moved: The axes where the model reads it, and those in which it is stored between reads, where these differ: for a
        dim that an axis asks for and does not divide, and for a parameter with no dim that an axis should cut.
    """

    names: tuple[str | None, ...]
    axes: tuple[tuple[str, ...], ...]
    why: str
    moved: tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]] | None = None


def spec_of(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Returns the `PartitionSpec` of per-dim axes, without trailing Nones."""
    entries = [None if not a else a[0] if len(a) == 1 else tuple(a) for a in axes]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def resolve(
    path: str,
    leaf: Leaf,
    sizes: Mapping[str, int],
    *,
    names: Mapping[str, Axes],
    paths: Mapping[str, Sequence[str]],
    rules: Mapping[str, Axes] = NO_RULES,
    read: Read | None = None,
) -> tuple[Choice, list[Problem]]:
    """Returns where one parameter's dims go, and what is wrong with that.

    The user's rules come first, then those that the model's author gave, then jaxpar's own names.

    Args:
      path: Such as `blocks/attention/query/kernel`.
      leaf: Its shape and the names the model gave its dims.
      sizes: Mesh axis to size.
      names: Dim name to mesh axes, first come first served within a parameter.
      paths: The user's own patterns (end of path) to names of the trailing dims.
      rules: The user's own rules, which are among `names`.
      read: The names of its dims that were read, where the model gives none.
    """
    given, why = _named(path, leaf, paths)
    if isinstance(given, Problem):
        return Choice((None,) * len(leaf.shape), ((),) * len(leaf.shape), why), [given]
    if given is None:
        return (_largest(path, leaf, sizes) if read is None else _found(path, leaf, sizes, names, read)), []
    axes: list[tuple[str, ...]] = []
    taken: set[str] = set()
    problems = []
    by_author, ruled = leaf.axes if why == ANNOTATION else None, False
    for dim, (name, size) in enumerate(zip(given, leaf.shape, strict=True)):
        word: Any = name
        # a dim of layers is a pipeline's, which the user asks for
        if by_author and name != "layers" and not (isinstance(name, str) and name in rules):
            word, ruled = by_author[dim], ruled or by_author[dim] != name
            if word != name or given == by_author:  # else a name that the author's rules leave out
                problems += _unknown_axes(path, dim, name, word, {*names, *sizes})
        # an axis splits an array once: of two dims that ask for it the first has it (a square matrix named twice)
        wanted = tuple(axis for axis in axes_of_name(word, names) if sizes.get(axis, 1) > 1 and axis not in taken)
        ways = 1
        for axis in wanted:
            ways *= sizes[axis]
        if size % ways:
            problems.append(_indivisible(path, leaf, dim, name, wanted, ways))
            wanted = ()
        taken.update(wanted)
        axes.append(wanted)
    return Choice(tuple(given), tuple(axes), f"{why}, by rules of the model's own" if ruled else why), problems


def _unknown_axes(path: str, dim: int, name: Any, word: Any, known: set[str]) -> list[Problem]:
    """Returns the axes of the author's mesh that the layout has none of, and no rule for."""
    axes = word if isinstance(word, (tuple, list)) else (word,)
    unknown = [axis for axis in axes if isinstance(axis, str) and axis not in known]
    return [
        Problem(
            f"{path}: the model splits dim {dim} ({name}) over {axis!r}, which is no axis of the mesh",
            rule="an axis of the author's mesh is one of the layout's, or has a rule",
            fix=f'rules={{"{axis}": "tensor"}} in Parallel, or {{"{axis}": None}}',
        )
        for axis in unknown
    ]


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


def axes_of_name(name: Any, names: Mapping[str, Axes]) -> tuple[str, ...]:
    """Returns the mesh axes of a name of a dim, of several names for one dim, or of an axis itself."""
    if isinstance(name, (tuple, list)):  # P(("data", "fsdp"), None): several mesh axes on one dim
        return tuple(axis for part in name for axis in axes_of_name(part, names))
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
        return leaf.names, ANNOTATION
    return None, "largest dim"


def _found(path: str, leaf: Leaf, sizes: Mapping[str, int], names: Mapping[str, Axes], read: Read) -> Choice:
    """Returns the axes of dims that were read. None binds: where an axis does not divide, it stores another dim."""
    rank = len(leaf.shape)
    given, pieces, why = read.names[-rank:] if rank else (), read.pieces[-rank:] if rank else (), read.why
    axes: list[tuple[str, ...]] = []
    padded: int | None = None
    for dim, (name, most) in enumerate(zip(given, pieces, strict=True)):
        taken = {axis for on in axes for axis in on}
        wanted = tuple(axis for axis in axes_of_name(name, names) if sizes.get(axis, 1) > 1 and axis not in taken)
        ways = math.prod(sizes[axis] for axis in wanted)
        if most % ways:
            count = f"{name}={most}" if most == leaf.shape[dim] else f"{most} {name}"
            why = f"{why}; {count} not divisible by {'x'.join(wanted)}={ways}"
            padded = dim if name == "vocab" and wanted == ("tensor",) else padded
            wanted = ()
        axes.append(wanted)
    choice = Choice(given, tuple(axes), why)
    cut = "tensor" in {axis for on in axes for axis in on}
    if sizes.get("tensor", 1) == 1 or cut or own_dims(path, leaf) < 2 or not (read.followed or why != read.why):
        return choice
    return _moved(leaf, choice, sizes["tensor"], padded)


def _moved(leaf: Leaf, choice: Choice, ways: int, padded: int | None) -> Choice:
    """Returns a choice in which `tensor` stores a parameter along its largest dim that divides.

    Where the model reads it, it is gathered; a vocabulary is cut there into pieces that are padded inside of the
    program, so that neither logits nor their matmuls are computed more than once. The state has the model's own shapes.
    For two layers of GPT-2 medium and 4,096 tokens, compiled for `tensor` over eight H100s, that sends 99 MiB more than
    a table that is whole (367 for 268: 0.2 ms of NVLink) and computes 5.6 times less (239 GFLOP for 1,345: 2 ms of
    bf16). It pays from a few hundred tokens of a replica on.
    """
    fitting = [dim for dim, size in enumerate(leaf.shape) if size % ways == 0 and choice.names[dim] != "layers"]
    if not fitting or leaf.bytes < SMALL:
        return choice
    best = max(fitting, key=lambda dim: (leaf.shape[dim], dim))

    def on(dim: int | None) -> tuple[tuple[str, ...], ...]:
        return tuple((*axes, "tensor") if at == dim else axes for at, axes in enumerate(choice.axes))

    read = "gathered" if padded is None else f"cut along {choice.names[padded]} with padding"
    why = f"{choice.why}; stored over tensor along {choice.names[best] or leaf.shape[best]}, {read} where it is read"
    return replace(choice, why=why, moved=(on(padded), on(best)))


def _largest(path: str, leaf: Leaf, sizes: Mapping[str, int]) -> Choice:
    """Returns `tensor` on the largest dim that it divides, of a table on the features; vectors stay whole."""
    axes: list[tuple[str, ...]] = [()] * len(leaf.shape)
    ways, own = sizes.get("tensor", 1), own_dims(path, leaf)
    fitting = [dim for dim, size in enumerate(leaf.shape) if size % ways == 0 and size >= ways]
    why = "no names"
    if leaf.shape[:1] == (1,):  # where examples are broadcast: it is added to the stream, which is not cut
        whole = Choice((None,) * len(leaf.shape), tuple(axes), why)
        return whole if ways == 1 or own < 2 else _moved(leaf, whole, ways, None)
    # a vector is cheap to keep whole, and split it would put a collective around every elementwise op that adds it
    if ways > 1 and own > 1 and fitting:
        on = max(fitting, key=lambda dim: (dim >= len(leaf.shape) - own, leaf.shape[dim], dim))
        why = "no names: tensor on the largest dim"
        if re.search("(^|/)embedding$", path) and len(leaf.shape) - 1 in fitting:
            # by rows, what is looked up would be summed over `tensor`, and every device would compute with all of it
            on, why = len(leaf.shape) - 1, "no names: tensor on the features of a table"
        axes[on] = ("tensor",)
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
