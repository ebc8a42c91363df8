"""PipeDream's partitioner: splits a profile into replicated stages for a topology, by a chosen objective.

    partition(linearise(load("vgg16.graph.txt")), ((16, 1.25e9),))      15-1

Source: Narayanan et al. (2019), "PipeDream: generalized pipeline parallelism for DNN training", section 3.1.

A `Partition` is the report: the plan, its bottleneck, and the reason why a simpler plan is worse.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf, isfinite
from typing import Any

from jaxpar.errors import JaxparError, refuse
from jaxpar.partition.chain import Chain
from jaxpar.partition.dynamic_program import CLOSE, Tables
from jaxpar.partition.objective import Bytes, Level, Objective, Seconds, Topology, devices, levels
from jaxpar.partition.replicated_stages import PartitionStage, Segment, plan_name, price_stages
from jaxpar.units import show_bytes, show_seconds

HEADINGS = (
    *("stage", "layers", "replicas", "computes", "all-reduces", "sends"),
    *("depth", "versions", "memory", "limited by"),
)
LARGEST = 20_000  # layers x parts of a level, at most: a search takes seconds and a few hundred MiB


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
        rows = [HEADINGS, *(_row(number, stage) for number, stage in enumerate(self.stages))]
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
    all_reduces = " + ".join(show_seconds(seconds) for seconds in stage.all_reduces if seconds) or "-"
    return (
        *(str(number), names, str(stage.replicas), show_seconds(stage.computes), all_reduces),
        *(show_seconds(stage.sends) if stage.sends else "-", str(stage.depth), str(stage.versions)),
        show_bytes(stage.memory),
        stage.limit.replace(" its weights", ""),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def partition(chain: Chain, topology: Topology, objective: Objective | None = None) -> Partition:
    """Finds the plan with the fewest stages that is within the objective's margin of the fastest.

    Args:
      chain: The layers, from `linearise`.
      topology: (size, bandwidth in bytes per second, or Link) of each level, innermost first: ((8, 12e9), (4, 1.25e9)).
      objective: The objective to minimise.

    Raises:
      JaxparError: If the topology is not symmetric or has a link without bandwidth; if a plan on fewer parts of the
        outermost level is faster than on all; if no plan fits in memory (the message has the stage, its deficit, and a
        fix); if the search would be too large.
    """
    tree, objective = levels(topology), objective or Objective()
    for number, level in enumerate(tree, 1):
        if len(chain.names) * level.size > LARGEST:
            raise refuse(
                f"{len(chain.names)} layers on {level.size} parts of level {number}",
                rule=f"layers times parts of a level is at most {LARGEST}",
                fix=f"levels of at most {LARGEST // len(chain.names)} parts, or fewer layers, by merging neighbours",
            )
    unlimited = _search(chain, tree, replace(objective, memory=inf))
    search = unlimited if unlimited.suits(objective) else _search(chain, tree, objective)
    times, parts = search.least, search.useful(objective)
    if parts < len(times):
        raise refuse(
            f"{len(times)} parts of the outermost level: {show_seconds(times[-1])} a minibatch, "
            f"{parts} of them: {show_seconds(times[parts - 1])}",
            rule="adding parts to the outermost level must make a minibatch faster",
            fix=f"({parts}, ...) as the outermost level",
        )
    ruled_out = f"{plan_name(unlimited.parts)} does not fit: its {_most_memory(unlimited.stages, objective.memory)[1]}"
    return Partition(
        parts=search.parts,
        stages=search.stages,
        tree=tree,
        objective=objective,
        least_seconds=times[-1],
        seconds_by_stages=search.fewer,
        data_parallel=max(
            stage.seconds for stage in price_stages([_data_parallel(chain, tree)], chain, tree, objective)
        ),
        ruled_out=ruled_out if search.parts != unlimited.parts else "",
    )


@dataclass(frozen=True)
class _SearchResult:
    """The result of a search: the plan, and the shortest times on 1, 2, ... parts and with 1, 2, ... stages."""

    parts: tuple[Segment, ...]
    stages: tuple[PartitionStage, ...]
    least: list[float]
    fewer: tuple[float, ...]

    def useful(self, objective: Objective) -> int:
        """Returns the number of parts of the outermost level to use: all, unless fewer are faster by more than the
        margin.
        """
        slower = self.least[-1] > min(self.least) * (1 + objective.margin) * CLOSE
        return self.least.index(min(self.least)) + 1 if slower else len(self.least)

    def suits(self, objective: Objective) -> bool:
        """Whether this result, which was found without a memory limit, fits in the memory."""
        fits = max(stage.memory for stage in self.stages) <= objective.memory
        best = self.fewer[-1] <= self.least[-1] * CLOSE and self.useful(objective) == len(self.least)
        return not isfinite(objective.memory) or (fits and best)


def _search(chain: Chain, tree: Sequence[Level], objective: Objective) -> _SearchResult:
    tables = Tables(Seconds(chain, tree, objective), len(chain.names), tree)
    times = tables.least_costs
    if not isfinite(times[-1]):
        raise _too_little_memory(chain, tree, objective)
    parts, fewer = tables.fewest_stages(times[-1] * (1 + objective.margin))
    return _SearchResult(parts, price_stages(parts, chain, tree, objective), times, tuple(fewer))


def _data_parallel(chain: Chain, tree: Sequence[Level]) -> Segment:
    """Returns the plan of pure data parallelism, in which every device has all layers."""
    inner = (_data_parallel(chain, tree[:-1]),) if len(tree) > 1 else ()
    return Segment(0, len(chain.names), tree[-1].size, inner)


def _most_memory(stages: Sequence[PartitionStage], limit: float) -> tuple[PartitionStage, str]:
    """Returns the stage that needs the most memory, and a text with its deficit."""
    number = max(range(len(stages)), key=lambda index: stages[index].memory)
    stage = stages[number]
    deficit = f"{stage.memory - limit:,.0f} B ({show_bytes(stage.memory - limit)}) over {show_bytes(limit)}"
    need = f"{stage.versions} x (weights {show_bytes(stage.parameters)} + activations {show_bytes(stage.activations)})"
    return stage, f"stage {number} ({stage.layers[0]}..{stage.layers[-1]}) needs {need}, {deficit}"


def _too_little_memory(chain: Chain, tree: Sequence[Level], objective: Objective) -> JaxparError:
    """Returns the error for too little memory: the plan that needs the least, its deficit, and a fix."""
    tables = Tables(Bytes(chain, tree, objective), len(chain.names), tree)
    parts, _ = tables.fewest_stages(tables.least_costs[-1])
    stages, limit = price_stages(parts, chain, tree, objective), objective.memory
    stage, text = _most_memory(stages, limit)
    factors = [(limit / block.versions - block.parameters) / block.activations for block in stages if block.activations]
    remedy = f"; or {min(factors) * 0.99:.3g} of the minibatch" if min(factors, default=0) > 0 else ", or more devices"
    return refuse(
        f"no plan fits; in the plan that needs the least memory, {plan_name(parts)}, {text}",
        rule="weights and activations of every minibatch in flight fit into the memory of a device",
        fix=f"memory = {ceil(stage.memory)}, {show_bytes(stage.memory)} per device{remedy}",
    )
