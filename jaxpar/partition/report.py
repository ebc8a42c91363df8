"""The partitioner's report: the plan, its bottleneck, and the reason why a simpler plan is worse."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

from jaxpar.partition.objective import Objective
from jaxpar.partition.stages import PartitionStage, Segment, plan_name
from jaxpar.partition.topology import Level, devices
from jaxpar.units import show_bytes, show_seconds

HEADINGS = (
    *("stage", "layers", "replicas", "computes", "agrees", "sends"),
    *("depth", "versions", "memory", "limited by"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A plan. All seconds are modelled, per minibatch.

    Attributes:
      parts: The tree of segments.
      stages: The stages, in order.
      tree: The levels of the topology, innermost first.
      objective: The objective that it minimises.
      least_seconds: Seconds of the fastest plan with any number of stages.
      seconds_by_stages: Seconds of the fastest plan with 1, 2, ... stages, up to the number of this plan; inf if no
        plan fits in memory.
      data_parallel: Seconds of pure data parallelism, even if it does not fit in memory.
      ruled_out: The best plan without the memory limit, and the memory that it lacks; "" if it is this plan.
    """

    parts: tuple[Segment, ...]
    stages: tuple[PartitionStage, ...]
    tree: tuple[Level, ...]
    objective: Objective
    least_seconds: float
    seconds_by_stages: tuple[float, ...]
    data_parallel: float
    ruled_out: str = ""

    @property
    def name(self) -> str:
        """Replicas of each stage: 15-1, or 3(4)-1(2-1-1) on several levels."""
        return plan_name(self.parts)

    @property
    def seconds(self) -> float:
        """The seconds of a minibatch."""
        return max(stage.total_seconds for stage in self.stages)

    @property
    def speedup(self) -> float:
        """The speedup over data parallelism."""
        return self.data_parallel / self.seconds

    @property
    def noam(self) -> int:
        """Minibatches in flight per replica of the first stage: ceil(devices / its replicas)."""
        return -(-devices(self.tree) // self.stages[0].replicas)

    @property
    def limit(self) -> str:
        """The bottleneck of the plan."""
        number = max(range(len(self.stages)), key=lambda index: self.stages[index].total_seconds)
        stage = self.stages[number]
        if stage.limit == "sends":
            return f"what stage {number} sends to stage {number + 1}: {show_seconds(stage.sends)}"
        part, total = show_seconds(stage.terms[stage.limit]), show_seconds(stage.seconds)
        return f"stage {number}, which {stage.limit}: {part}" + (f" of {total}" if total != part else "")

    @property
    def why(self) -> str:
        """The reason for the plan's number of stages."""
        total = len(self.stages)
        simpler = [
            f"{count} would take {_more(self.seconds_by_stages[count - 1], self.least_seconds)}"
            for count in sorted({1, total - 1} - {0})
        ]
        gain = f"; more stages could take {1 - self.least_seconds / self.seconds:.1%} less time"
        return (
            f"{total} stage{'s' * (total > 1)}: the fewest within {self.objective.margin:.1%} of the fastest plan, "
            + "; ".join([show_seconds(self.least_seconds), *(simpler if total > 1 else [])])
            + (gain if self.seconds > self.least_seconds * (1 + 1e-9) else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values; seconds are per minibatch."""
        stages = [
            asdict(stage) | {"takes": stage.total_seconds, "limit": stage.limit, "memory": stage.memory}
            for stage in self.stages
        ]
        totals = {key: getattr(self, key) for key in ("name", "seconds", "data_parallel", "speedup", "noam", "limit")}
        remarks = {"why": self.why, "ruled_out": self.ruled_out, "how": "modelled"}
        levels = [{"size": level.size, **asdict(level.link)} for level in self.tree]
        objective = {key: value if value != inf else None for key, value in asdict(self.objective).items()}
        return totals | {"stages": stages, "levels": levels, "objective": objective} | remarks

    def __str__(self) -> str:
        links = " x ".join(f"{level.size} at {level.link.bandwidth / 1e9:.4g} GB/s" for level in self.tree)
        rows = [
            ("stage", "layers", "replicas", "computes", "agrees", "sends", "depth", "versions", "memory", "limited by")
        ]
        rows += [_row(number, stage) for number, stage in enumerate(self.stages)]
        memory = f", {show_bytes(self.objective.memory)} per device" if isfinite(self.objective.memory) else ""
        lines = [
            f"{self.name} on {links}: {show_seconds(self.seconds)} a minibatch, {self.speedup:.2f} x as fast as data "
            f"parallel ({show_seconds(self.data_parallel)}); modelled",
            *_table(rows),
            f"limited by {self.limit}; NOAM {self.noam}: minibatches in flight per replica of stage 0",
            self.why,
            *([f"memory: {self.ruled_out}"] if self.ruled_out else []),
            f"objective: coefficient {self.objective.coefficient}, overlap {self.objective.overlap:g}{memory}",
        ]
        return "\n  ".join(lines)


def _more(took: float, least: float) -> str:
    return f"{took / least - 1:.1%} more" if isfinite(took) else "more memory than there is"


def _row(number: int, stage: PartitionStage) -> tuple[str, ...]:
    names = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]}..{stage.layers[-1]}"
    agrees = " + ".join(show_seconds(seconds) for seconds in stage.agrees if seconds) or "-"
    return (
        *(str(number), names, str(stage.replicas), show_seconds(stage.computes), agrees),
        *(show_seconds(stage.sends) if stage.sends else "-", str(stage.depth), str(stage.versions)),
        show_bytes(stage.memory),
        stage.limit.replace(" on its weights", ""),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
