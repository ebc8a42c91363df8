"""Compares what a device computes in a step with its own share of what was asked for.

    traced step    FLOP of matmuls over all devices, remat and idle ticks among them  ──/ devices──► its share
    compiled step  FLOP of matmuls on each device                                                    what it makes

Where it makes more, devices do the same work: some array is whole where it should be in pieces. Its values are right,
so that nothing else would show it. What XLA runs again of its own accord, to save memory, is not counted.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxpar.hlo.attribution import users_frame
from jaxpar.hlo.flop import hardware_flop, op_flop
from jaxpar.hlo.matmuls import parse_matmuls
from jaxpar.hlo.text import Frame, Module, parse
from jaxpar.hlo.traced_flop import traced_matmuls
from jaxpar.hlo.trip_counts import walk
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.units import show_count

ALLOWED = 1.05  # times its share: XLA rounds pieces up where a size does not divide
_NAMED = 3  # lines that a message names, at most


@dataclass(frozen=True)
class OwnShare:
    """The matmuls of a traced step, of which each device should make an equal part.

    Attributes:
      devices: How many there are.
      schedule: The table of its pipeline; None without one.
      asked: (FLOP over all devices, lines of Python that ask for them) of each matmul.
      zeros: FLOP of one device that multiply zeros, where XLA makes dense convolutions of the gradients of depthwise
        kernels: for processors, not for GPUs. They are nobody's share, and no work that devices repeat.
    """

    devices: int
    schedule: Schedule | None
    asked: tuple[tuple[float, Any], ...] = field(repr=False)
    zeros: float = 0.0

    @property
    def flop(self) -> float:
        """FLOP of one device."""
        return sum(flop for flop, _ in self.asked) / self.devices

    @cached_property
    def by_line(self) -> dict[tuple[str, int], float]:
        """(file, line) of the user's to FLOP of one device."""
        found: dict[tuple[str, int], float] = defaultdict(float)
        for flop, traceback in self.asked:
            stack = traceback.frames if traceback else ()
            frames = [Frame(each.file_name, each.line_num, each.function_name) for each in stack]
            found[_line(frames)[0]] += flop / self.devices
        return found


@dataclass(frozen=True)
class Excess:
    """The matmuls that a device makes beyond its share.

    Attributes:
      made: FLOP of one device, as compiled.
      own: FLOP of its share.
      lines: Where most of it is, `net.py:12 in __call__`, most first.
    """

    made: float
    own: float
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"each device computes {show_count(self.made)} FLOP of matmuls in a step, {self.made / self.own:.2f} times "
            f"its share of {show_count(self.own)}; most of the excess: {'; '.join(self.lines) or 'an unknown line'}"
        )


# of every excess: which constraint it was, or which size, only the user can tell
FIX = (
    "a sharding constraint there that splits what is whole, by names that have a rule (jp.constrain, or rules in "
    "Parallel), or the constraint gone that makes it whole, or an axis of a size that divides heads and widths; "
    "`explain()` says which it does not divide, `jaxpar inspect` what is gathered"
)


def own_share(jaxpr: Any, devices: int, schedule: Schedule | None) -> OwnShare | None:
    """Returns what each device should compute of a traced step; None where loops turn as often as the data says."""
    matmuls = tuple(traced_matmuls(jaxpr, schedule))
    if any(flop is None for _, flop in matmuls):
        return None
    asked = tuple((flop, equation.source_info.traceback) for equation, flop in matmuls)
    zeros = sum(flop * (equation.params["batch_group_count"] - 1) for equation, flop in matmuls if _depthwise(equation))
    return OwnShare(devices, schedule, asked, zeros / devices)


def _depthwise(equation: Any) -> bool:
    """Returns whether this is the gradient of a kernel with a group for every channel that it makes."""
    if equation.primitive.name != "conv_general_dilated":
        return False
    features = equation.params["dimension_numbers"].out_spec[1]
    return 1 < equation.params["batch_group_count"] == equation.outvars[0].aval.shape[features]


def find_excess(program: str | Module, share: OwnShare | None) -> Excess | None:
    """Returns what a device computes beyond its share, where that is more than 5 %.

    Args:
      program: As compiled, or the text of it.
      share: Of the same step as it was traced.
    """
    if share is None or share.devices == 1 or not share.flop:
        return None
    matmuls = parse_matmuls(program) if isinstance(program, str) else program
    flop = hardware_flop(matmuls, share.schedule)
    made = flop.total - flop.squeezed
    if made <= ALLOWED * share.flop + share.zeros * _multiplies_zeros(matmuls):
        return None
    module = parse(program) if isinstance(program, str) else program  # now the lines are wanted, whatever that costs
    return Excess(made, share.flop, tuple(_lines(module, share)))


def _multiplies_zeros(module: Module) -> bool:
    """Returns whether convolutions are XLA's own: for GPUs they are cuDNN's, which has a kernel for groups."""
    return any(op.opcode == "convolution" for ops in module.computations.values() for op in ops)


def _lines(module: Module, share: OwnShare) -> list[str]:
    made: dict[tuple[str, int], float] = defaultdict(float)
    functions: dict[tuple[str, int], str] = {}
    for visit in walk(module, share.schedule):
        if flop := op_flop(module, visit.computation, visit.op):
            line, function = _line(module.stack(visit.op))
            made[line] += (visit.times or 1) * flop * (not visit.squeezed)
            functions[line] = function
    more = {line: flop - share.by_line.get(line, 0.0) for line, flop in made.items()}
    first = sorted((line for line in more if more[line] > 0 and functions[line]), key=lambda line: -more[line])[:_NAMED]
    return [f"{Path(line[0]).name}:{line[1]} in {functions[line]}" for line in first]


def _line(stack: Iterable[Frame]) -> tuple[tuple[str, int], str]:
    """Returns the line of the user's that a stack of them leads to, and its function."""
    frame = users_frame(list(stack)) or Frame("", 0, "")
    return (frame.file, frame.line), frame.function.split(".")[-1]
