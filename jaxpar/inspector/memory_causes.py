"""Memory by cause: arguments by arithmetic, temporary memory from XLA's buffer assignment.

    total = arguments + outputs that do not reuse a donated argument + temporary memory

XLA places all temporary buffers in one block. This module finds the moment of the step at which the largest part of the
block is in use, and attributes every byte to the buffer that covers it at that moment; bytes that no buffer covers are
packing overhead. So the causes add up exactly to the total.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.errors import refuse
from jaxpar.hlo.attribution import ArrayCauses, join_names
from jaxpar.hlo.provenance import DataFlow
from jaxpar.hlo.source_frames import is_backward, is_recomputed, shorten_label, user_frame
from jaxpar.hlo.text import HloArray, Module, Op, arrays
from jaxpar.inspector.compiled import Compiled
from jaxpar.sharding.names import GRADIENT, TABLE

CAUSES = ("parameters", "optimizer state", "other state", "batch", "arguments", "gradients", "gathered weights",
          "activations", "logits", "everything else")  # fmt: skip
# lines of XLA's dumps: allocations with their values, and the lifetime of each value in steps of the schedule
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*):$")
_VALUE = re.compile(r"^ value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_SPAN = re.compile(r"^    ([^\s{]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_TEMPORARY = "preallocated-temp"
_FILLED = re.compile(r"/broadcast\.\d+$")


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one cause on one device.

    Attributes:
      cause: One of `CAUSES`.
      bytes: Bytes per device.
      how: `exact`, arithmetic on shapes and specs; or `compiled`, as assigned by XLA.
      largest: Its largest arrays, (name, bytes), largest first.
    """

    cause: str
    bytes: int
    how: str
    largest: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value in the block of temporary memory.

    Attributes:
      name: The instruction that defines it.
      index: Index in its result, for a tuple.
      size: Bytes.
      offset: Offset in the block.
      array: Shape and dtype; None for a tuple's own pointers.
    """

    name: str
    index: tuple[int, ...]
    size: int
    offset: int
    array: HloArray | None


def temporaries(compiled: Compiled) -> list[Buffer]:
    """Returns the values that are live when the use of temporary memory is largest.

    Raises:
      JaxparError: If XLA's files have an unknown format.
    """
    block: dict[tuple[str, tuple[int, ...]], Buffer] = {}
    size, inside = 0, False
    for line in compiled.assignment.splitlines():
        if match := _ALLOCATION.match(line):
            # of several temporary allocations the largest counts
            inside = _TEMPORARY in match[3] and int(match[2]) > size
            if inside:
                block, size = {}, int(match[2])
        elif inside and (match := _VALUE.match(line)):
            index = _index(match[2])
            types = arrays(match[5]) if not match[5].startswith("(") else ()
            block[match[1], index] = Buffer(match[1], index, int(match[3]), int(match[4]), types[0] if types else None)
    if compiled.temporary and not block:
        raise refuse(
            "XLA's buffer assignment has no block of temporary memory",
            rule="memory by cause is read from the files of jaxlib 0.10 to 0.12",
            fix="a newer jaxpar",
        )
    return _live_at_peak(block, compiled.lifetimes)


def _live_at_peak(block: dict[tuple[str, tuple[int, ...]], Buffer], lifetimes: str) -> list[Buffer]:
    """Returns the buffers that are live when the use of the block is largest.

    This differs from the peak that XLA itself reports, which also counts arguments and aliases.
    """
    spans = []
    for line in lifetimes.splitlines():
        if (match := _SPAN.match(line)) and (buffer := block.get((match[1], _index(match[2])))):
            spans.append((int(match[3]), int(match[4]), buffer))
    changes = sorted({start for start, _, _ in spans})  # usage grows only where a buffer begins
    best, peak = [], -1
    for now in changes:
        alive = [buffer for start, end, buffer in spans if start <= now <= end]
        # values that share a place (in-place operations) count once
        used = sum({(buffer.offset, buffer.size): buffer.size for buffer in alive}.values())
        if used > peak:
            best, peak = alive, used
    return best


def cover(buffers: Iterable[Buffer]) -> list[tuple[Buffer, int]]:
    """Returns the bytes of the block that each value covers; if values overlap, the largest counts."""
    occupied: list[tuple[int, int]] = []
    result = []
    for buffer in sorted(buffers, key=lambda buffer: (-buffer.size, buffer.offset)):
        free = buffer.size
        for start, end in occupied:
            free -= max(0, min(end, buffer.offset + buffer.size) - max(start, buffer.offset))
        if free > 0:
            result.append((buffer, free))
            occupied = _merge_spans([*occupied, (buffer.offset, buffer.offset + buffer.size)])
    return result


def _merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def bytes_by_cause(compiled: Compiled, module: Module, causes: ArrayCauses) -> list[Share]:
    """Bytes by cause; they add up to `total(compiled)`.

    The padding of arguments, which their shapes do not show, is a separate entry under `everything else`.
    """
    shares: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    argument_bytes = 0
    for argument in causes.arguments:
        shares[argument.role][argument.path] += argument.bytes
        argument_bytes += argument.bytes
    exact = set(shares)  # so far; causes added below for temporary memory are `compiled`
    uncategorized = shares["everything else"]
    if compiled.arguments != argument_bytes:
        uncategorized[
            "arguments beyond their shapes" if compiled.arguments > argument_bytes else "arguments that nothing reads"
        ] += compiled.arguments - argument_bytes
    if compiled.outputs > compiled.aliased:
        uncategorized["outputs"] += compiled.outputs - compiled.aliased
    uncovered = compiled.temporary
    reader = _Reader(module, causes)
    for buffer, size in cover(temporaries(compiled)):
        cause, name = reader.buffer_cause(buffer)
        shares[cause][name] += size
        uncovered -= size
    if uncovered:
        uncategorized["packing of temporary memory"] += uncovered
    return [
        Share(
            cause,
            sum(shares[cause].values()),
            "exact" if cause in exact else "compiled",
            tuple(sorted(shares[cause].items(), key=lambda entry: -abs(entry[1]))[:8]),
        )
        for cause in (*CAUSES, *sorted(set(shares) - set(CAUSES)))
        if sum(shares[cause].values())
    ]


def total(compiled: Compiled) -> int:
    """Bytes that one device needs for this program, as XLA compiled it."""
    return compiled.arguments + compiled.outputs - compiled.aliased + compiled.temporary


class _Reader:
    """Finds the cause of a temporary buffer from the instruction that fills it."""

    def __init__(self, module: Module, causes: ArrayCauses):
        self.module, self.causes = module, causes
        self.trace = DataFlow(module)
        self.logits = self._shapes_of_loss()
        # the buffer assignment does not name instructions inside an asynchronous fusion: their buffers get the label of
        # any labelled instruction of the same shape
        self.like: dict[HloArray, tuple[Op, tuple[int, ...]]] = {}
        self.ticking: dict[HloArray, Op] = {}  # instructions inside the tick table of a pipeline
        for _, op in module.ops():
            if op.label:
                for number, array in enumerate(op.arrays):
                    self.like.setdefault(array, (op, _entry(op, number)))
                    if TABLE in op.label:
                        self.ticking.setdefault(array, op)

    def _shapes_of_loss(self) -> set[tuple[int, ...]]:
        """The shapes of the largest arrays that the loss function itself computes."""
        sizes = {
            array.dims: array.size
            for _, op in self.module.ops()
            if (frame := user_frame(self.module.stack(op))) and self.causes.is_loss(frame)
            for array in op.arrays
        }
        # the loss handles logits and arrays of one number per token: those above half of the largest are logits
        largest = max(sizes.values(), default=0)
        large = {dims for dims, size in sizes.items() if len(dims) > 1 and size * 2 > largest}
        return large | {(math.prod(dims[:-1]), dims[-1]) for dims in large}  # in matmuls XLA merges batch and sequence

    def buffer_cause(self, buffer: Buffer) -> tuple[str, str]:
        """The cause, and the name of the array."""
        op = self._maker(buffer)
        label = op.label if op else ""
        frame = user_frame(self.module.stack(op)) if op else None
        array = buffer.array
        if array is None:
            return "everything else", "pointers of tuples"
        # from the strongest clue to the weakest: the value's origin, then scopes of gradients, then shapes
        if path := self._parameter(buffer, label):
            return "gathered weights", path
        candidates = self.causes.parameters_like(array.dims)
        place = (
            f"{shorten_label(label)}, {frame.file.rsplit('/', 1)[-1]}:{frame.line}" if frame else shorten_label(label)
        )
        forward = ("jvp(" in label and not is_backward(label)) or is_recomputed(label)
        # inside a pipeline's tick table an array of a parameter's shape outside of the forward pass is a sum of
        # gradients, or a copy of one that a conditional chooses from
        if GRADIENT in label or (candidates and not forward and TABLE in label):
            return "gradients", join_names(candidates) if candidates else f"{array} {place}"
        if candidates and not forward and array.dims not in self.logits:
            return (
                ("gradients", join_names(candidates))
                if is_backward(label)
                else (
                    "everything else",
                    f"while updating {join_names(candidates)}",
                )
            )
        if array.dims in self.logits:
            return "logits", f"{array} {place}"
        if "jvp(" in label or is_recomputed(label) or is_backward(label) or TABLE in label:
            return "activations", f"{array} {place}"
        return "everything else", f"{array} {place}".rstrip()

    def _parameter(self, buffer: Buffer, label: str) -> str | None:
        """Returns the path of the parameter that a buffer is a gathered, cast or copied version of, or None."""
        name, index, like = buffer.name, buffer.index, self.like.get(buffer.array) if buffer.array else None
        if name not in self.trace.places and like is not None:
            name, index = like[0].name, like[1]
        number = self.trace.argument_number(name, index)
        if number is not None and self.causes.numbered:
            argument = self.causes.arguments[number]
            return argument.path if argument.role in ("parameters", "arguments") else None
        if is_backward(label):
            return None
        stack = self.causes.stack_like(buffer.array.dims) if buffer.array and "jvp(" in label else None
        return self.causes.scope(label) or stack

    def _maker(self, buffer: Buffer) -> Op | None:
        op = self.trace.producer(buffer.name, buffer.index)
        # zeros that XLA hoisted out of a loop are labelled as a broadcast: the instruction of that shape in the tick
        # table says which sum they start
        if op and buffer.array and _FILLED.search(op.label):
            return self.ticking.get(buffer.array, op)
        like = self.like.get(buffer.array) if buffer.array else None
        return op or (like[0] if like else None)


def _entry(op: Op, number: int) -> tuple[int, ...]:
    """The index of an array in an instruction's result; the result of a start is (operands, results)."""
    if len(op.arrays) == 1:
        return ()
    return divmod(number, len(op.operands)) if op.opcode.endswith("-start") and len(op.operands) > 1 else (number,)


def _index(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(",") if part)
