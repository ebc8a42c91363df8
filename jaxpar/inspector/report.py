"""What XLA made of a step, as one value: memory by cause, the ledger, FLOP, a modelled time, and flags.

Every number says what it is: `exact`, arithmetic on shapes and specs; `compiled`, XLA said so;
`modelled`, a formula.
"""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpar.errors import refuse
from jaxpar.inspector import memory
from jaxpar.inspector.branches import check_branches
from jaxpar.inspector.causes import Argument, Causes
from jaxpar.inspector.compiled import compile_program
from jaxpar.inspector.flags import Flag, find_flags
from jaxpar.inspector.flop import Flop, hardware_flop
from jaxpar.inspector.hlo import parse
from jaxpar.inspector.ledger import collectives
from jaxpar.inspector.memory import Share
from jaxpar.inspector.stages import facts
from jaxpar.inspector.subject import Subject, of_function
from jaxpar.inspector.timeline import Timeline, replay
from jaxpar.mesh.chips import Chip, find_chip
from jaxpar.mesh.collective import Collective
from jaxpar.mesh.devices import took
from jaxpar.mesh.pool import Pool, taken
from jaxpar.pipeline.schedule import Schedule
from jaxpar.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class Report:
    """What XLA made of one program on one mesh.

    Attributes:
      title: What was inspected.
      devices: How many, of what.
      sizes: Mesh axis to size, outermost first.
      per_node: Devices of one machine.
      chip: The GPU; None on simulated devices, which have neither a capacity nor a time.
      pool: What a run takes of the GPU's memory, or this process took.
      memory: Bytes of one device by cause; they add up to `total`.
      total: Bytes that one device needs.
      ledger: Every collective of a step, the largest traffic first.
      flop: Of one device, as compiled.
      model_flop: Of a step over all devices, without recomputation; None where it is not known.
      timeline: The modelled step; None on simulated devices.
      flags: What should not be.
      arguments: Every array the program is given.
      schedule: What the stages of its pipeline do in every tick; None without one.
      notes: What the reader should know.
      seconds: That compiling took.
      versions: Of jax and jaxlib.
      knobs: If it does not fit: what would free memory, (change, bytes freed), most first.
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
        """What a program may take, in words: of how much, and why not all of it."""
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
            not in ("chip", "pool", "memory", "ledger", "flags", "arguments", "flop", "timeline", "schedule")
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

    def __str__(self) -> str:
        from jaxpar.inspector.terminal import page

        return page(self)

    def _repr_html_(self) -> str:
        from jaxpar.inspector.page import fragment

        return fragment(self)

    def html(self, path: str | Path | None = None) -> str:
        """Returns the report as one self-contained HTML page, and writes it to `path`."""
        from jaxpar.inspector.page import page

        text = page(self)
        if path is not None:
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise refuse(
                    f"{path}: {error.strerror}", rule="a file in a folder that exists", fix="report.html"
                ) from error
        return text


def inspect(program: Any, *args: Any, roles: Sequence[str] = (), mesh: Mesh | None = None, **kwargs: Any) -> Report:
    """Compiles a program for the devices of its mesh, runs nothing, and returns what XLA made of it.

    Args:
      program: A `Step` of `jp.build`, or any jitted function.
      *args: What it is called with: arrays, or `jax.ShapeDtypeStruct`s with shardings. For a `Step`, a batch.
      roles: For a jitted function, what each of its arguments is: `parameters`, `optimizer state`, `other state`,
        `batch` or `arguments`.
      mesh: For a jitted function whose arguments have no mesh.
      **kwargs: Passed on to the jitted function.

    Raises:
      JaxparError: If it is not jitted, does not compile, or its arguments are on several meshes; or if the table of a
        pipeline would wait for ever (`check_branches`).
    """
    if hasattr(program, "subject"):
        return report(program.subject(*args))
    return report(of_function(program, args, kwargs, roles=roles, mesh=mesh))


def report(subject: Subject, chip: Chip | None = None) -> Report:
    """Returns what XLA made of a subject, on a chip that is as jaxpar's table has it, or as it is given here."""
    devices = list(subject.mesh.devices.flat)
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    compiled = compile_program(subject.lowered, platform=platform)
    module = parse(compiled.text)
    sizes = {str(axis): size for axis, size in subject.mesh.shape.items()}
    if subject.schedule:
        check_branches(module, sizes, subject.schedule)
    entry = module.computations[module.entry]
    causes = Causes(
        subject.arguments,
        parameters=sum(op.opcode == "parameter" for op in entry),
        used=subject.used,
        loss=subject.loss,
        batch_axes=subject.batch_axes,
        chunks=subject.schedule.chunks if subject.schedule else 1,
    )
    ledger = collectives(module, sizes, causes, subject.schedule)
    flop = hardware_flop(module, subject.schedule)
    if platform == "gpu" and devices[0].platform != "tpu":
        chip = chip or find_chip(devices[0].device_kind)
    nodes: dict[int, int] = defaultdict(int)
    for device in devices:
        nodes[device.process_index] += 1
    per_node = max(nodes.values())
    notes = list(subject.notes)
    if platform == "cpu":
        notes.append(
            "compiled for the processor: XLA has no reduce-scatter there (an all-reduce and a slice instead), sends "
            "16 bits as 32, and needs other temporary memory; no capacity, no time"
        )
    elif chip is None:
        notes.append(f"{devices[0].device_kind} is no GPU of jaxpar's table of chips: no capacity, no time")
    timed = chip if chip and (chip.network or len(nodes) == 1) else None
    if chip and not timed:
        notes.append(f"what joins machines with {chip.name} is not in jaxpar's table of chips: no time")
    return Report(
        title=subject.title,
        devices=f"{len(devices)} x {chip.name if chip else devices[0].device_kind}",
        sizes=sizes,
        per_node=per_node,
        chip=chip,
        pool=_pool(devices[0], chip),
        memory=tuple(memory.by_cause(compiled, module, causes)),
        total=memory.total(compiled),
        ledger=tuple(ledger),
        flop=flop,
        model_flop=subject.model_flop,
        timeline=replay(module, sizes, timed, per_node) if timed else None,
        flags=tuple(find_flags(subject, ledger, flop, compiled.said)),
        arguments=subject.arguments,
        schedule=subject.schedule,
        notes=tuple(notes),
        seconds=compiled.seconds,
        versions={name: version(name) for name in ("jax", "jaxlib")},
    )


def _pool(device: Any, chip: Chip | None) -> Pool:
    """Returns what this process took of a GPU that is there, or a run would take with the same variables."""
    own = took(device) if chip else None
    if own is None or chip is None:
        return taken(os.environ)
    return Pool(part=min(1.0, own / chip.visible), why="as this process did")
