"""Facts about a compiled step: the numbers of a report, without the pages that show them.

Every number says what it is: `exact`, arithmetic on shapes and specs; `compiled`, XLA said so;
`modelled`, a formula.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxpar.hlo.attribution import Argument
from jaxpar.hlo.flop import Flop
from jaxpar.html.pieces import Card
from jaxpar.inspector.findings import Flag
from jaxpar.inspector.memory import Share
from jaxpar.inspector.pages.pipeline import facts
from jaxpar.inspector.timeline import Timeline
from jaxpar.mesh.chips import Chip
from jaxpar.mesh.collective import Collective
from jaxpar.mesh.memory_pool import Pool
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about one compiled program on one mesh.

    Attributes:
      title: Name of the inspected program.
      devices: Their number and kind.
      sizes: Mesh axis to size, outermost first.
      per_node: Devices of one machine.
      chip: The GPU; None on simulated devices, which have neither a capacity nor a time.
      pool: The share of the GPU's memory that a run preallocates, or this process did.
      memory: Bytes of one device by cause; they add up to `total`.
      total: Bytes that one device needs.
      ledger: Every collective of a step, the largest traffic first.
      flop: Of one device, as compiled.
      model_flop: Of a step over all devices, without recomputation; None where it is not known.
      timeline: The modelled step; None on simulated devices.
      flags: Warnings.
      arguments: Every array the program is given.
      schedule: The schedule of its pipeline; None without one.
      cards: How its parameters are cut, and which devices hold the pieces.
      host: Bytes of temporary arrays in the host's memory, per device, as compiled.
      notes: Remarks for the reader.
      seconds: That compiling took.
      versions: Of jax and jaxlib.
      knobs: If it does not fit: changes that would free memory, (change, bytes freed), most first.
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
        """Devices."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def capacity(self) -> int | None:
        """Bytes of a device that a program may take."""
        return None if self.chip is None else self.pool.room(self.chip.visible)

    @property
    def room(self) -> str:
        """The memory that a program may take, in words: of how much, and why not all of it."""
        if self.capacity is None or self.chip is None:
            return ""
        of = f"{show_bytes(self.capacity)} of the {self.chip.name}'s {show_bytes(self.chip.visible)}"
        return f"{of} are for a program: {self.pool}"

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None on simulated devices."""
        return None if self.capacity is None else self.total <= self.capacity

    @property
    def mfu(self) -> float | None:
        """Modelled share of the chips' bfloat16 peak that the model's FLOP reach; None without a model or a chip."""
        if self.chip is None or self.timeline is None or not self.model_flop or not self.timeline.seconds:
            return None
        return self.model_flop / self.timeline.seconds / (self.chip.bf16_flops * self.count)

    @cached_property
    def by_axis(self) -> dict[str, dict[str, float]]:
        """Axes to kind to wire bytes of one device in a step."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for entry in self.ledger:
            found[entry.axis][entry.kind] += entry.step_wire
        return {axis: dict(kinds) for axis, kinds in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON wants it."""
        made = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name
            not in ("chip", "pool", "memory", "ledger", "flags", "arguments", "flop", "timeline", "schedule", "cards")
        }
        made |= {
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
            "arguments": [dataclasses.asdict(each) | {"bytes": each.bytes} for each in self.arguments],
            "ledger": [
                dataclasses.asdict(entry)
                | {"wire": entry.wire, "step_wire": entry.step_wire, "step_payload": entry.step_payload}
                for entry in self.ledger
            ],
        }
        return made
