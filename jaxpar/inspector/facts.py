"""Facts about a compiled step: the numbers of a report, without the pages that show them.

Every number states its provenance: `exact`, arithmetic on shapes and specs; `compiled`, reported by XLA; `modelled`, a
formula.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxpar.hlo.attribution import Argument
from jaxpar.hlo.flop import Flop
from jaxpar.html.charts import Card
from jaxpar.inspector.findings import Flag
from jaxpar.inspector.memory_causes import Share
from jaxpar.inspector.pages.pipeline import facts
from jaxpar.inspector.timeline import Timeline
from jaxpar.mesh.chips import Chip
from jaxpar.mesh.collective import Collective
from jaxpar.mesh.memory_pool import Pool
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """The facts about one compiled program on one mesh.

    Attributes:
      title: Name of the inspected program.
      devices: Number and kind of the devices.
      sizes: Sizes of the mesh axes by name, outermost first.
      per_node: Devices per machine.
      chip: The GPU; None on simulated devices, for which no memory limit and no time are reported.
      pool: The share of the GPU's memory that a run preallocates, or that this process did.
      memory: Bytes of one device by cause; they add up to `total`.
      total: Bytes that one device needs.
      ledger: Every collective of a step, the largest traffic first.
      flop: FLOP of one device in the compiled program.
      model_flop: FLOP of a step over all devices, without recomputation; None if unknown.
      timeline: The modelled step; None on simulated devices.
      flags: Warnings.
      arguments: Every array argument of the program.
      schedule: The schedule of its pipeline; None without one.
      cards: The shards of its parameters, and the devices that hold them.
      host: Bytes of temporary arrays in host memory, per device, in the compiled program.
      notes: Remarks for the reader.
      seconds: Compilation time.
      versions: Versions of jax and jaxlib.
      knobs: If it does not fit: changes that would free memory, (change, bytes freed), largest first.
    """

    title: str
    devices: str
    sizes: dict[str, int]
    per_node: int
    chip: Chip | None
    pool: Pool = field(default_factory=Pool)
    memory: tuple[Share, ...]
    total: int
    ledger: tuple[Collective, ...] = field(repr=False)
    flop: Flop
    model_flop: float | None
    timeline: Timeline | None = field(repr=False)
    flags: tuple[Flag, ...]
    arguments: tuple[Argument, ...] = field(repr=False)
    schedule: Schedule | None = field(default=None, repr=False)
    cards: tuple[Card, ...] = field(default=(), repr=False)
    host: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    knobs: tuple[tuple[str, int], ...] = ()

    @property
    def count(self) -> int:
        """Number of devices."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def capacity(self) -> int | None:
        """Bytes of a device that a program may use."""
        return None if self.chip is None else self.pool.program_bytes(self.chip.visible_memory)

    @property
    def room(self) -> str:
        """The memory that a program may use, in words: its size, and the reason why it is not the whole memory."""
        if self.capacity is None or self.chip is None:
            return ""
        amount = f"{show_bytes(self.capacity)} of the {self.chip.name}'s {show_bytes(self.chip.visible_memory)}"
        return f"{amount} are for a program: {self.pool}"

    @property
    def fits(self) -> bool | None:
        """Whether the program fits in memory; None on simulated devices."""
        return None if self.capacity is None else self.total <= self.capacity

    @property
    def mfu(self) -> float | None:
        """Modelled share of the chips' bfloat16 peak that the model's FLOP reach; None without a model or a chip."""
        if self.chip is None or self.timeline is None or not self.model_flop or not self.timeline.seconds:
            return None
        return self.model_flop / self.timeline.seconds / (self.chip.bf16_flops * self.count)

    @cached_property
    def by_axis(self) -> dict[str, dict[str, float]]:
        """Bytes that one device sends in a step: {axes: {kind of collective: bytes}}."""
        totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for entry in self.ledger:
            totals[entry.axis][entry.kind] += entry.step_wire
        return {axis: dict(kinds) for axis, kinds in totals.items()}

    def to_dict(self) -> dict[str, Any]:
        """The report as values for JSON."""
        result = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name
            not in ("chip", "pool", "memory", "ledger", "flags", "arguments", "flop", "timeline", "schedule", "cards")
        }
        result |= {
            "chip": self.chip.name if self.chip else None,
            "capacity": self.capacity,
            "room": self.room,
            "fits": self.fits,
            "mfu": self.mfu,
            "by_axis": self.by_axis,
            "pipeline": facts(self.schedule, self.ledger) if self.schedule else None,
            "memory": [dataclasses.asdict(share) for share in self.memory],
            "flop": dataclasses.asdict(self.flop) | {"total": self.flop.total},
            "timeline": dataclasses.asdict(self.timeline) if self.timeline else None,
            "flags": [dataclasses.asdict(flag) for flag in self.flags],
            "arguments": [dataclasses.asdict(item) | {"bytes": item.bytes} for item in self.arguments],
            "ledger": [
                dataclasses.asdict(entry)
                | {"wire": entry.wire, "step_wire": entry.step_wire, "step_payload": entry.step_payload}
                for entry in self.ledger
            ],
        }
        return result
