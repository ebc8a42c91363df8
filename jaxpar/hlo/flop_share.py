"""Compares a device's FLOP in a step with its share of the traced step.

    traced step    FLOP of matmuls over all devices, including remat and idle ticks   ──/ devices──► its share
    compiled step  FLOP of matmuls on each device

If a device computes more than its share, devices repeat each other's work: some array is replicated that should be
sharded. The results are correct, so nothing else would show it. XLA's recomputation to save memory does not count.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.hlo.flop import hardware_flop, op_flop, parse_matmuls, ragged_groups, traced_matmuls
from jaxpar.hlo.source_frames import user_frame
from jaxpar.hlo.text import Module, SourceFrame, parse
from jaxpar.hlo.trip_counts import walk
from jaxpar.models.islands import MIXTURE
from jaxpar.units import show_count

if TYPE_CHECKING:  # a step without a pipeline need not import these
    from jaxpar.hlo.unsplit_lines import UnsplitLines
    from jaxpar.parallel.layout import Layout
    from jaxpar.pipeline.tables.schedule import Schedule

ALLOWED = 1.05  # times its share: XLA rounds shards up where a size does not divide
_NAMED = 3  # lines in a message, at most


@dataclass(frozen=True)
class FlopShare:
    """The matmuls of a traced step, of which each device should compute an equal share.

    Attributes:
      devices: Number of devices.
      schedule: The table of the pipeline; None without a pipeline.
      matmuls: (FLOP over all devices, Python lines) of each matmul.
      zeros: FLOP of one device that multiply zeros, because on CPUs, not GPUs, XLA computes gradients of depthwise
        kernels by dense convolutions. These FLOP belong to no share, and are not repeated work.
      ragged: FLOP of one device that XLA adds to ragged matmuls, whose entries it multiplies by the matrices of all
        groups. They belong to no share.
      layout: The layout: its names may leave a dim unsharded, so that devices repeat work; None if unknown.
    """

    devices: int
    schedule: "Schedule | None"
    matmuls: tuple[tuple[float, Any], ...] = field(repr=False)
    zeros: float = 0.0
    ragged: float = 0.0
    layout: "Layout | None" = field(default=None, repr=False, compare=False)

    @property
    def flop(self) -> float:
        """FLOP of one device."""
        return sum(flop for flop, _ in self.matmuls) / self.devices

    @cached_property
    def flop_by_line(self) -> dict[tuple[str, int], float]:
        """(file, line) of the user's code to its FLOP on one device."""
        sums: dict[tuple[str, int], float] = defaultdict(float)
        for flop, traceback in self.matmuls:
            stack = traceback.frames if traceback else ()
            frames = [SourceFrame(frame.file_name, frame.line_num, frame.function_name) for frame in stack]
            sums[_line(frames)[0]] += flop / self.devices
        return sums


@dataclass(frozen=True)
class Excess:
    """The matmuls that a device computes beyond its share.

    Attributes:
      computed_flop: FLOP of one device in the compiled program.
      share_flop: FLOP of a device's share.
      lines: Lines of code with the largest excess, `net.py:12 in __call__`, largest first.
      ragged_flop: FLOP of the excess that XLA adds to ragged matmuls.
      unsplit: The lines whose arrays stay unsharded because of their names in `Parallel.activations`; None if there are
        no such lines.
    """

    computed_flop: float
    share_flop: float
    lines: tuple[str, ...]
    ragged_flop: float = 0.0
    unsplit: "UnsplitLines | None" = None

    @property
    def fixes(self) -> tuple[str, ...]:
        """The ways out, as text."""
        repeated = self.computed_flop > ALLOWED * (self.share_flop + self.ragged_flop)
        return (
            *([MIXTURE] if self.ragged_flop else []),
            *([self.unsplit.fix if self.unsplit else FIX] if repeated else []),
        )

    def __str__(self) -> str:
        ragged = (
            f"; {show_count(self.ragged_flop)} are of jax.lax.ragged_dot, whose entries XLA multiplies by the matrices "
            "of all groups"
        )
        return (
            f"each device computes {show_count(self.computed_flop)} FLOP of matmuls in a step, "
            f"{self.computed_flop / self.share_flop:.2f} times "
            f"its share of {show_count(self.share_flop)}; most of the excess: "
            f"{'; '.join(self.lines) or 'an unknown line'}{ragged if self.ragged_flop else ''}"
            f"{f'; {self.unsplit.cause}' if self.unsplit else ''}"
        )


# only the user knows which constraint or size caused it
FIX = (
    "a sharding constraint there that splits what is whole, by names that have a rule (jp.constrain, or rules in "
    "Parallel), or the constraint gone that makes it whole, or an axis of a size that divides heads and widths; "
    "`explain()` says which it does not divide, `jaxpar inspect` what is gathered"
)


def flop_share(
    jaxpr: Any, devices: int, schedule: "Schedule | None", layout: "Layout | None" = None
) -> FlopShare | None:
    """Computes each device's share of a traced step; None if a trip count depends on the data."""
    matmuls = tuple(traced_matmuls(jaxpr, schedule))
    if any(flop is None for _, flop in matmuls):
        return None
    traced = tuple((flop, equation.source_info.traceback) for equation, flop in matmuls)
    zeros = sum(flop * (equation.params["batch_group_count"] - 1) for equation, flop in matmuls if _depthwise(equation))
    ragged = sum(flop * (ragged_groups(equation) - 1) for equation, flop in matmuls)
    return FlopShare(devices, schedule, traced, zeros / devices, ragged / devices, layout)


def _depthwise(equation: Any) -> bool:
    """Whether a convolution is the gradient of a depthwise kernel, with one group per output channel."""
    if equation.primitive.name != "conv_general_dilated":
        return False
    features = equation.params["dimension_numbers"].out_spec[1]
    return 1 < equation.params["batch_group_count"] == equation.outvars[0].aval.shape[features]


def find_excess(program: str | Module, share: FlopShare | None) -> Excess | None:
    """Returns a device's excess over its share, if it is more than 5 %.

    Args:
      program: The compiled program, or its text.
      share: The device's share of the same traced step.
    """
    if share is None or share.devices == 1 or not share.flop:
        return None
    matmuls = parse_matmuls(program) if isinstance(program, str) else program
    flop = hardware_flop(matmuls, share.schedule)
    computed = flop.total - flop.squeezed
    if computed <= ALLOWED * share.flop + share.zeros * _multiplies_zeros(matmuls):
        return None
    module = parse(program) if isinstance(program, str) else program  # the message needs lines: all text
    # a kernel of ragged matmuls would compute less
    expanded = ALLOWED * computed >= share.flop + share.ragged
    from jaxpar.hlo.unsplit_lines import unsplit_lines  # only here

    lines = tuple(_lines(module, share))
    unsplit = unsplit_lines(share.layout, lines) if share.layout else None
    return Excess(computed, share.flop, lines, share.ragged if expanded else 0.0, unsplit)


def _multiplies_zeros(module: Module) -> bool:
    """Whether XLA itself runs convolutions; on GPUs cuDNN does, which has a kernel for groups."""
    return any(op.opcode == "convolution" for ops in module.computations.values() for op in ops)


def _lines(module: Module, share: FlopShare) -> list[str]:
    computed: dict[tuple[str, int], float] = defaultdict(float)
    functions: dict[tuple[str, int], str] = {}
    for visit in walk(module, share.schedule):
        if flop := op_flop(module, visit.computation, visit.op):
            line, function = _line(module.stack(visit.op))
            computed[line] += (visit.times or 1) * flop * (not visit.squeezed)
            functions[line] = function
    gaps = {line: flop - share.flop_by_line.get(line, 0.0) for line, flop in computed.items()}
    top = sorted((line for line in gaps if gaps[line] > 0 and functions[line]), key=lambda line: -gaps[line])[:_NAMED]
    return [f"{Path(line[0]).name}:{line[1]} in {functions[line]}" for line in top]


def _line(stack: Iterable[SourceFrame]) -> tuple[tuple[str, int], str]:
    """Returns the line and function of the user's code in a stack."""
    frame = user_frame(list(stack)) or SourceFrame("", 0, "")
    return (frame.file, frame.line), frame.function.split(".")[-1]
