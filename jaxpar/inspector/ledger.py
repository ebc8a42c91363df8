"""The ledger: every collective that a step runs, with its axes, its count and its cause."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxpar.hlo.attribution import Causes
from jaxpar.hlo.provenance import Trace
from jaxpar.hlo.replica_groups import attribute_text, axes_of, axes_of_pairs, parse_groups, parse_pairs
from jaxpar.hlo.text import Array, Module
from jaxpar.hlo.trip_counts import Visit, walk
from jaxpar.mesh.collective import KINDS, Collective
from jaxpar.pipeline.tables.schedule import Schedule


def collectives(
    module: Module, sizes: Mapping[str, int], causes: Causes, schedule: Schedule | None = None
) -> list[Collective]:
    """Returns every collective of a step, the largest traffic first; equal ones are one entry.

    Where XLA sends several arrays at once, each is an entry of its own.

    Args:
      module: The compiled program.
      sizes: Mesh axis to size, outermost first; partition i is the i-th device of the mesh.
      causes: Finds the cause of an array.
      schedule: The table that it runs, where it is a pipeline's.
    """
    found: dict[tuple, Collective] = {}
    trace = Trace(module)
    for visit in walk(module, schedule):
        if visit.op.opcode.removesuffix("-start") in KINDS:
            for entry in entries(trace, visit, sizes, causes):
                key = tuple(
                    getattr(entry, name) for name in entry.__dataclass_fields__ if name not in ("times", "count")
                )
                before = found.get(key)
                if before is not None:
                    entry = replace(before, times=_sum(before.times, entry.times))
                found[key] = entry
    return sorted(found.values(), key=lambda entry: -entry.step_wire)


def entries(trace: Trace, visit: Visit, sizes: Mapping[str, int], causes: Causes) -> list[Collective]:
    """Returns one collective as entries, one for each array it sends."""
    op, module = visit.op, trace.module
    kind = op.opcode.removesuffix("-start")
    senders = 1.0
    if kind == "collective-permute":
        pairs = parse_pairs(attribute_text(op.attributes, "source_target_pairs"), module.partitions)
        axes, group = axes_of_pairs(pairs, sizes), _ring(pairs)
        moved = sum(1 for a, b in pairs if a != b)
        senders = moved / module.partitions
    else:
        groups = parse_groups(attribute_text(op.attributes, "replica_groups"), module.partitions)
        axes, group = axes_of(groups, sizes), groups.shape[1]
    if group == 1:
        return []
    here = module.named[visit.computation]
    made = []
    operands = [part for name in op.operands for part in trace.parts(here[name])]
    split = (
        kind == "all-to-all" and op.attribute("dimensions") is None
    )  # one array, cut into an operand for each member
    for operand in operands[:: group if split else 1]:
        for array in operand.arrays:
            whole = array.bytes * (group if split or kind == "all-gather" else 1)
            cause = causes.of(trace, op, operand, _result(array, kind, group), kind=kind, axes=axes)
            made.append(
                Collective(
                    kind=kind,
                    axes=axes,
                    dtype=array.dtype,
                    group=group,
                    times=visit.times,
                    payload=whole,
                    senders=senders,
                    asynchronous=visit.asynchronous,
                    operation=cause.operation,
                    source=cause.source,
                    cause=cause.what,
                    loop=visit.loop,
                    backward=cause.backward,
                    parameters=cause.parameters,
                    count=sum(len(each.arrays) for each in operands) // (group if split else 1),
                )
            )
    return made


def _result(array: Array, kind: str, group: int) -> Sequence[Array]:
    """Returns the arrays that may tell which parameter it is: operands of a reduction, results of a gather."""
    if kind == "all-gather":
        return [
            Array(array.dtype, (*array.dims[:i], d * group, *array.dims[i + 1 :])) for i, d in enumerate(array.dims)
        ]
    return [array]


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _ring(pairs) -> int:
    """Returns the number of devices that a permute's longest chain or ring joins."""
    to = {int(a): int(b) for a, b in pairs}
    longest, seen = 1, set()
    targets = set(to.values())
    for start in sorted(to, key=targets.__contains__):  # the beginnings of open chains first
        length, at = 1, start
        while at in to and to[at] not in seen and at not in seen:
            seen.add(at)
            at = to[at]
            length += at != start
        longest = max(longest, length)
    return longest
