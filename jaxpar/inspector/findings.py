"""Warnings about a compiled step: unexpected collectives, dtypes and recomputation."""

import re
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

from jaxpar.hlo.attribution import Argument
from jaxpar.hlo.flop import Flop
from jaxpar.hlo.flop_share import Excess, find_excess
from jaxpar.hlo.provenance import DataFlow, Index
from jaxpar.hlo.source_frames import shorten_label
from jaxpar.hlo.text import BITS, Module, Op
from jaxpar.inspector.subject import Subject
from jaxpar.mesh.collective import Collective
from jaxpar.parallel.declaration import size_setting
from jaxpar.sharding.names import TOKENS
from jaxpar.units import show_bytes, show_count

REPEATED = "repeated work"
NOTABLE = 0.01  # share of a step's wire bytes below which a collective gets no flag


@dataclass(frozen=True, slots=True)
class Flag:
    """A warning about the compiled step.

    Attributes:
      kind: `repeated work`, `replicates`, `unsharded gradient`, `per microbatch`, `wide wire`, `idle axis`,
        `rematerialized`, `squeezed`, `summed scores`, `unknown`.
      text: The finding and its place.
      fix: A change that would fix it.
      bytes: Bytes per device and step that it costs on the wire, if known.
    """

    kind: str
    text: str
    fix: str
    bytes: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n    fix: {self.fix}"


def find_flags(
    subject: Subject, module: Module, ledger: Sequence[Collective], flop: Flop, log_lines: Sequence[str]
) -> list[Flag]:
    """All warnings: repeated work first, then by bytes on the wire."""
    sizes = dict(subject.mesh.shape)
    total = sum(entry.step_wire for entry in ledger) or 1.0
    notable = [entry for entry in ledger if entry.step_wire >= NOTABLE * total]
    arguments = {argument.path: argument for argument in subject.arguments}
    flags = [
        *_flag_gathered_examples(notable, subject.batch_axes),
        *_flag_unsharded(ledger, arguments, set(subject.batch_axes) - set(subject.unsharded_gradient_axes), total),
        *_per_microbatch(ledger, arguments, subject.batch_axes, sizes, total, reductions_needed=_reductions(subject)),
        *_wide_traffic(notable, _computes_in_16_bits(subject, flop)),
        *_idle(ledger, _axes_with_traffic(subject), {axis for argument in subject.arguments for axis in argument.axes}),
        *_flag_rematerialized(log_lines),
        *_flag_squeezed(flop),
        *_flag_unknown_loops(ledger, flop),
    ]
    return _flag_repeated_work(find_excess(module, subject.share)) + sorted(flags, key=lambda flag: -flag.bytes)


def _flag_repeated_work(excess: Excess | None) -> list[Flag]:
    return [Flag(REPEATED, str(excess), "; or ".join(excess.fixes))] if excess else []


def _axes_with_traffic(subject: Subject) -> dict[str, int]:
    return {axis: size for axis, size in subject.mesh.shape.items() if axis not in subject.axes_without_traffic}


def _computes_in_16_bits(subject: Subject, flop: Flop) -> bool:
    low = sum(count for dtype, count in flop.by_dtype.items() if BITS.get(dtype, 32) <= 16)
    return subject.precision == "bf16" or (flop.total > 0 and low >= 0.9 * flop.total)


def _plain_axes(entry: Collective) -> set[str]:
    return {axis.lstrip("~") for axis in entry.axes}


def _flag_gathered_examples(ledger: Sequence[Collective], batch_axes: Sequence[str]) -> list[Flag]:
    return [
        Flag(
            "replicates",
            f"all-gather over {entry.axis} of {show_bytes(entry.payload)} at {entry.source or 'an unknown line'} "
            f"({entry.cause}), {_times(entry)}: {entry.axis} splits "
            "the examples, so afterwards every device holds all of them",
            f"a sharding constraint there, or after it, that keeps {entry.axis} on the batch dim, or no constraint",
            entry.step_wire,
        )
        for entry in ledger
        if entry.kind in ("all-gather", "all-to-all")
        and not entry.has_parameters
        and entry.cause != TOKENS
        and _plain_axes(entry) & set(batch_axes)
    ]


def _flag_unsharded(
    ledger: Sequence[Collective], arguments: dict[str, Argument], batch_axes: Set[str], total: float
) -> list[Flag]:
    flags = []
    for entry in ledger:
        names = _argument_names(entry, arguments)
        axes = [
            a for a in _plain_axes(entry) & batch_axes if names and all(a in arguments[name].axes for name in names)
        ]
        if entry.kind == "all-reduce" and entry.backward and axes and entry.step_wire >= NOTABLE * total:
            flags.append(
                Flag(
                    "unsharded gradient",
                    f"all-reduce over {entry.axis} of the gradient of {entry.cause}, {show_bytes(entry.payload)}, "
                    f"{_times(entry)}: {axes[0]} splits the parameter, so a reduce-scatter of half the bytes would do",
                    "constrain the gradient to the parameter's sharding where it is computed and accumulated",
                    entry.step_wire / 2,
                )
            )
    return flags


def _per_microbatch(
    ledger: Sequence[Collective],
    arguments: dict[str, Argument],
    batch_axes: Sequence[str],
    sizes: dict[str, int],
    total: float,
    *,
    reductions_needed: int,
) -> list[Flag]:
    """Flags gradients that are reduced more often per step than needed; elements, not calls, are counted."""
    reductions: dict[tuple, list[Collective]] = defaultdict(list)
    for entry in ledger:
        if (
            entry.kind in ("all-reduce", "reduce-scatter")
            and entry.has_parameters
            and entry.loop
            and _plain_axes(entry) & set(batch_axes)
        ):
            names = _argument_names(entry, arguments)
            if names:
                reductions[names, entry.kind, entry.axes].append(entry)
    repeats: list[tuple[float, Collective]] = []
    for (names, *_), entries in reductions.items():
        elements = 0
        for name in names:
            size = 1
            for dim in arguments[name].shape:
                size *= dim
            for axis in set(arguments[name].axes) - set(batch_axes):
                size //= sizes[axis]
            elements += size
        elements_moved = sum(entry.step_payload * 8 // BITS[entry.dtype] for entry in entries)
        ratio = elements_moved / max(elements, 1)
        if ratio >= 1.9 * reductions_needed:
            repeats += [(ratio, entry) for entry in entries]
    wire = sum(entry.step_wire * (1 - reductions_needed / ratio) for ratio, entry in repeats)
    if not repeats or wire < NOTABLE * total:
        return []
    ratio, largest = max(repeats, key=lambda pair: pair[1].step_wire)
    return [
        Flag(
            "per microbatch",
            f"{largest.kind} over {largest.axis} of the gradient of {largest.cause} at {largest.source}, "
            f"{_times(largest)}, and {len(repeats) - 1} more: gradients are reduced {ratio:.3g} times in a step",
            "reduce once, after the loop: it saves these bytes and costs an unreduced accumulator on each device",
            wire,
        )
    ]


def _reductions(subject: Subject) -> int:
    """Returns the number of reductions of a gradient that a step needs: one, or one per tick with several updates."""
    return subject.schedule.ticks if subject.schedule and subject.updates > 1 else 1


def _wide_traffic(ledger: Sequence[Collective], low: bool) -> list[Flag]:
    """Finds 32-bit traffic that is neither a gradient nor a parameter sent from its stage to the others as stored."""
    return [
        Flag(
            "wide wire",
            f"{entry.kind} over {entry.axis} of {entry.dtype}, {show_bytes(entry.payload)}, {_times(entry)}, "
            f"at {entry.source or 'an unknown line'} ({entry.cause}): products are in 16 bits",
            "cast before the collective: astype(bfloat16), then the constraint that moves it",
            entry.step_wire / 2,
        )
        for entry in ledger
        if low
        and entry.dtype in ("f32", "f64")
        and not (entry.has_parameters and (entry.backward or (entry.kind, entry.axes) == ("all-reduce", ("pipe",))))
    ]


def _idle(ledger: Sequence[Collective], sizes: dict[str, int], splits: set[str]) -> list[Flag]:
    used = {axis for entry in ledger for axis in _plain_axes(entry)}
    return [
        Flag(
            "idle axis",
            f"{axis}={size} never communicates: "
            + (
                "its shards stay separate"
                if axis in splits
                else "no array is split over it, so its devices do the same work"
            ),
            f"{size_setting(axis, 1)} and another axis larger, or a sharding that names {axis}",
        )
        for axis, size in sizes.items()
        if size > 1 and axis not in used
    ]


def _flag_rematerialized(log_lines: Sequence[str]) -> list[Flag]:
    flags: dict[str, Flag] = {}
    for line in log_lines:
        match = re.search(r"HLO operation:? %?(\S+) = (\w+\[[\d,]*\])", line)
        name = re.search(r'op_name="([^"]*)"', line)
        label = f" ({shorten_label(name[1])})" if name else ""
        text = f"{match[2]} of {match[1]}{label}" if match else line.split("] ", 1)[-1][:200]
        flags[text] = Flag(
            "rematerialized",
            f"XLA replicates a whole array to reshard it: {text}",
            "add a sharding constraint that is halfway between the two shardings above",
        )
    return list(flags.values())


def _flag_squeezed(flop: Flop) -> list[Flag]:
    if not flop.squeezed or flop.squeezed < NOTABLE * flop.total:
        return []
    return [
        Flag(
            "squeezed",
            f"XLA computes {show_count(flop.squeezed)} FLOP ({flop.squeezed / flop.total:.1%}) again of its own "
            "accord, because the program needs more memory than it may use",
            "less memory: train.remat, more microbatches, another layout; `jaxpar plan` compares them",
        )
    ]


def _flag_unknown_loops(ledger: Sequence[Collective], flop: Flop) -> list[Flag]:
    open_ended = [entry for entry in ledger if entry.times is None]
    if not open_ended and not flop.unknown:
        return []
    return [
        Flag(
            "unknown",
            f"{len(open_ended)} collectives{' and FLOP' * flop.unknown} are in a loop whose trip count depends on the "
            "data: they are counted once",
            "lax.scan or fori_loop with a fixed length, if one is meant",
        )
    ]


def _argument_names(entry: Collective, arguments: dict[str, Argument]) -> tuple[str, ...]:
    return tuple(name for name in entry.parameters if name in arguments)


def _times(entry: Collective) -> str:
    if entry.times is None:
        return "unknown times a step"
    return "once a step" if entry.times == 1 else f"{entry.times} times a step"


# Finds attention scores that are summed over devices: `tensor` shards head_dim instead of heads.

_SUM = ("all-reduce", "all-reduce-start")


def find_scores(module: Module, subject: Subject, ledger: Sequence[Collective]) -> list[Flag]:
    """Flags each all-reduce over `tensor` of a matmul of two activations.

    Attention scores are a matmul with batch dims whose operands are both activations. If `tensor` shards the contracted
    dim, head_dim, each device has a partial sum of every score, and XLA all-reduces [batch, heads, queries, keys],
    whose size grows with the square of the sequence.
    """
    trace = DataFlow(module)
    weights = {number for number, argument in enumerate(subject.arguments) if argument.role == "parameters"}
    sums = {
        (array.bytes, shorten_label(trace.label(op)))
        for _, op in module.ops()
        if op.opcode in _SUM
        for name, array in zip(op.operands, op.arrays, strict=False)
        if _is_of_activations(trace, name, weights)
    }
    total = sum(entry.step_wire for entry in ledger)
    return [
        Flag(
            "summed scores",
            f"all-reduce over {entry.axis} of {show_bytes(entry.payload)} at {entry.source or 'an unknown line'} "
            f"({entry.cause}): each device has a part of every attention score, because tensor shards head_dim",
            'tensor on the heads: paths={"q_proj/kernel": (None, "heads", None), ...}, or names in the model',
            entry.step_wire,
        )
        for entry in ledger
        if entry.kind == "all-reduce"
        and "tensor" in {axis.lstrip("~") for axis in entry.axes}
        and (entry.payload, entry.operation) in sums
        and entry.step_wire >= NOTABLE * total
    ]


def _is_of_activations(trace: DataFlow, name: str, weights: set[int]) -> bool:
    """Whether a value comes from a batched matmul, neither operand of which is a parameter."""
    index: Index = ()
    for _ in range(20):
        op = trace.places[name][1] if name in trace.places else None
        if op is None:
            return False
        if op.opcode in ("dot", "custom-call") and _has_batch(op):
            return all(trace.argument_number(operand) not in weights for operand in op.operands[:2])
        origin = trace.source(name, index, through_loops=False)
        if origin is None:
            return False
        name, index = origin
    return False


def _has_batch(op: Op) -> bool:
    return "lhs_batch_dims={" in op.attributes or '"lhs_batch_dimensions":["' in op.attributes
