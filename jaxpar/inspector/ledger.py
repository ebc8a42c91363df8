"""The ledger: every collective that a step runs, with its axes, its count and its cause."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxpar.hlo.attribution import ArrayCauses
from jaxpar.hlo.provenance import DataFlow
from jaxpar.hlo.replica_groups import (
    attribute_text,
    axes_of_groups,
    axes_of_pairs,
    equal_groups,
    parse_groups,
    parse_pairs,
)
from jaxpar.hlo.text import HloArray, Module
from jaxpar.hlo.trip_counts import Visit, walk
from jaxpar.mesh.collective import KINDS, Collective
from jaxpar.pipeline.tables.schedule import Schedule


def collectives(
    module: Module, sizes: Mapping[str, int], causes: ArrayCauses, schedule: Schedule | None = None
) -> list[Collective]:
    """All collectives of a step, the largest traffic first; equal ones are one entry.

    If XLA sends several arrays at once, each is a separate entry.

    Args:
      module: The compiled program.
      sizes: Sizes of the mesh axes by name, outermost first; partition i is the i-th device of the mesh.
      causes: Finds the cause of an array.
      schedule: The schedule of its pipeline, if it has one.
    """
    result: dict[tuple, Collective] = {}
    trace = DataFlow(module)
    for visit in walk(module, schedule):
        if visit.op.opcode.removesuffix("-start") in KINDS:
            for entry in entries(trace, visit, sizes, causes):
                key = tuple(
                    getattr(entry, name) for name in entry.__dataclass_fields__ if name not in ("times", "count")
                )
                previous = result.get(key)
                if previous is not None:
                    entry = replace(previous, times=_sum(previous.times, entry.times))
                result[key] = entry
    return sorted(result.values(), key=lambda entry: -entry.step_wire)


def entries(trace: DataFlow, visit: Visit, sizes: Mapping[str, int], causes: ArrayCauses) -> list[Collective]:
    """One collective as entries, one per array that it sends, and per size of its groups."""
    op, module = visit.op, trace.module
    kind = op.opcode.removesuffix("-start")
    if kind == "collective-permute":
        pairs = parse_pairs(attribute_text(op.attributes, "source_target_pairs"), module.partitions)
        sender_count = sum(1 for a, b in pairs if a != b)
        senders = sender_count / module.partitions
        return _entries(trace, visit, causes, axes=axes_of_pairs(pairs, sizes), group=_ring(pairs), senders=senders)
    groups = parse_groups(attribute_text(op.attributes, "replica_groups"), module.partitions)
    result = []
    for equal in equal_groups(groups):
        # replicas of a stage send to each other, and the single device of another stage sends nothing
        senders = 1.0 if len(equal) == len(groups) else equal.size / module.partitions
        axes, group = axes_of_groups(equal, sizes), equal.shape[1]
        result += _entries(trace, visit, causes, axes=axes, group=group, senders=senders)
    return result


def _entries(
    trace: DataFlow, visit: Visit, causes: ArrayCauses, *, axes: tuple[str, ...], group: int, senders: float
) -> list[Collective]:
    if group == 1:
        return []
    op = visit.op
    kind = op.opcode.removesuffix("-start")
    ops_by_name = trace.module.ops_by_name[visit.computation]
    result = []
    operands = [part for name in op.operands for part in trace.parts(ops_by_name[name])]
    # an all-to-all without `dimensions` has one operand for each device of the group: the pieces of one array
    split = kind == "all-to-all" and op.attribute("dimensions") is None
    for operand in operands[:: group if split else 1]:
        for array in operand.arrays:
            payload = array.bytes * (group if split or kind == "all-gather" else 1)
            cause = causes.find_cause(trace, op, operand, _result(array, kind, group), kind=kind, axes=axes)
            result.append(
                Collective(
                    kind=kind,
                    axes=axes,
                    dtype=array.dtype,
                    group=group,
                    times=visit.times,
                    payload=payload,
                    senders=senders,
                    asynchronous=visit.asynchronous,
                    operation=cause.operation,
                    source=cause.source,
                    cause=cause.name,
                    loop=visit.loop,
                    backward=cause.backward,
                    parameters=cause.parameters,
                    count=sum(len(value.arrays) for value in operands) // (group if split else 1),
                )
            )
    return result


def _result(array: HloArray, kind: str, group: int) -> Sequence[HloArray]:
    """The arrays whose shape may identify the parameter: operands of a reduction, results of a gather."""
    if kind == "all-gather":
        return [
            HloArray(array.dtype, (*array.dims[:i], d * group, *array.dims[i + 1 :])) for i, d in enumerate(array.dims)
        ]
    return [array]


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def _ring(pairs) -> int:
    """The number of devices in a permute's longest chain or ring."""
    successor = {int(a): int(b) for a, b in pairs}
    longest, seen = 1, set()
    targets = set(successor.values())
    for start in sorted(successor, key=targets.__contains__):  # the beginnings of open chains first
        length, device = 1, start
        while device in successor and successor[device] not in seen and device not in seen:
            seen.add(device)
            device = successor[device]
            length += device != start
        longest = max(longest, length)
    return longest
