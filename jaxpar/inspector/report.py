"""Inspects a step: memory by cause, the ledger of collectives, FLOP, a modelled time, and flags, as one value.

Every number states its provenance: `exact`, arithmetic on shapes and specs; `compiled`, reported by XLA; `modelled`, a
formula.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpar.errors import refuse
from jaxpar.files import write_page
from jaxpar.hlo.attribution import ArrayCauses
from jaxpar.hlo.branches import check_branches
from jaxpar.hlo.flop import hardware_flop
from jaxpar.hlo.text import parse
from jaxpar.inspector import memory_causes
from jaxpar.inspector.compiled import compile_program
from jaxpar.inspector.facts import ReportFacts
from jaxpar.inspector.findings import find_flags, find_scores
from jaxpar.inspector.ledger import collectives
from jaxpar.inspector.pages import html as pages
from jaxpar.inspector.pages import report_text
from jaxpar.inspector.subject import Subject, from_function, step_subject
from jaxpar.inspector.timeline import LINE, replay
from jaxpar.mesh.chips import Chip, find_chip
from jaxpar.mesh.devices import allocated_bytes
from jaxpar.mesh.memory_pool import Pool, pool_of_environment
from jaxpar.step.step import Step
from jaxpar.units import show_bytes, show_seconds


class Report(ReportFacts):
    """The facts about one compiled program, and their pages; see `ReportFacts` for the attributes."""

    def __repr__(self) -> str:
        flags = f", {len(self.flags)} flag{'s' * (len(self.flags) != 1)}" if self.flags else ""
        return (
            f"<report: {self.title.partition(':')[0]}, on {self.devices}: {show_bytes(self.total)} per device{flags}>"
        )

    def __str__(self) -> str:
        return report_text.page(self)

    def _repr_html_(self) -> str:
        return pages.fragment(self)

    def html(self, path: str | Path | None = None) -> str:
        """The report as one self-contained HTML page; also written to `path`, if given."""
        text = pages.page(self)
        if path is not None:
            write_page(path, text, like="report.html")
        return text


def inspect(program: object, *args: Any, roles: Sequence[str] = (), mesh: Mesh | None = None, **kwargs: Any) -> Report:
    """Compiles a program for the devices of its mesh and returns a report about it; nothing is run.

    Args:
      program: A `Step` of `jp.train_step`, or any jitted function.
      *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings. For a `Step`, a batch.
      roles: For a jitted function, the role of each of its arguments: `parameters`, `optimizer state`, `other state`,
        `batch` or `arguments`.
      mesh: For a jitted function whose arguments have no mesh.
      **kwargs: Passed to the jitted function. For a `Step`, `sync_round=1` inspects the step with a sync round,
        if the replicas do not synchronize in every step (2, 3, ... if there are several kinds of sync rounds).

    Raises:
      JaxparError: If it is not jitted, does not compile, or its arguments are on several meshes; or if a pipeline's
        tick table would deadlock (`check_branches`).
    """
    if isinstance(program, Step):
        if not args and "batch" not in kwargs:
            raise refuse(
                "jp.inspect(step) without a batch",
                rule="a step is compiled for the shapes of a batch",
                fix='jp.inspect(step, {"inputs": jax.ShapeDtypeStruct((32, 128), "int32"), ...})',
            )
        unknown = [*(key for key in kwargs if key not in ("batch", "sync_round"))]
        unknown += (
            ["roles"] * bool(roles)
            + ["mesh"] * (mesh is not None)
            + ["a second argument"] * (len(args) + ("batch" in kwargs) > 1)
        )
        if unknown:
            raise refuse(
                f"jp.inspect(step, batch) with {', '.join(unknown)}",
                rule="a step has devices and roles of its own; jp.inspect takes its batch and sync_round",
                fix='jp.inspect(step, batch); jp.target_devices("h100:1x8") at first compiles it for absent GPUs',
            )
        sync_round = kwargs.get("sync_round", 0)
        if not isinstance(sync_round, Integral) or sync_round < 0:
            rule = "the number of the sync round that ends the step, from 1; 0 for none"
            raise refuse(f"sync_round={sync_round!r:.60}", rule=rule, fix="sync_round=1")
        return build_report(step_subject(program, *args, **kwargs))
    return build_report(from_function(program, args, kwargs, roles=roles, mesh=mesh))


def build_report(subject: Subject, chip: Chip | None = None) -> Report:
    """Builds the report about a subject, on a chip of jaxpar's table or on the given one."""
    devices = list(subject.mesh.devices.flat)
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    compiled = compile_program(
        subject.lowered, devices, use_cache=subject.cacheable, compiler_options=subject.compiler_options
    )
    module = parse(compiled.text)
    sizes = {str(axis): size for axis, size in subject.mesh.shape.items()}
    if subject.schedule:
        check_branches(module, sizes, subject.schedule)
    entry = module.computations[module.entry]
    causes = ArrayCauses(
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
            "compiled for the CPU: XLA has no reduce-scatter there (an all-reduce and a slice instead), sends "
            "16 bits as 32, and needs other temporary memory; no capacity, no time"
        )
    elif chip is None:
        notes.append(f"{devices[0].device_kind} is no GPU of jaxpar's table of chips: no capacity, no time")
    if compiled.host:
        notes.append(_describe_host_arrays(compiled.host, subject.microbatches, chip))
    timed_chip = chip if chip and (chip.network or len(nodes) == 1) else None
    if chip and not timed_chip:
        notes.append(f"no time: the network between machines with {chip.name} is not in jaxpar's table of chips")
    return Report(
        title=subject.title,
        devices=f"{len(devices)} x {chip.name if chip else devices[0].device_kind}",
        sizes=sizes,
        per_node=per_node,
        chip=chip,
        pool=_pool(devices[0], chip),
        memory=tuple(memory_causes.bytes_by_cause(compiled, module, causes)),
        total=memory_causes.total(compiled),
        ledger=tuple(ledger),
        flop=flop,
        model_flop=subject.model_flop,
        timeline=replay(module, sizes, timed_chip, per_node) if timed_chip else None,
        flags=(*find_scores(module, subject, ledger), *find_flags(subject, module, ledger, flop, compiled.said)),
        arguments=subject.arguments,
        schedule=subject.schedule,
        cards=subject.cards,
        host=compiled.host,
        notes=tuple(notes),
        seconds=compiled.seconds,
        versions={name: version(name) for name in ("jax", "jaxlib")},
    )


def _describe_host_arrays(size: int, microbatches: int, chip: Chip | None) -> str:
    """Describes the arrays in host memory during a step, and the time to send them there and back."""
    text = f"{show_bytes(size)} of temporary arrays are in host memory, per device (compiled)"
    if chip is None or chip.pcie is None:
        return f"{text}; jaxpar's table of chips has no PCIe bandwidth of {chip.name if chip else 'this device'}"
    duration = show_seconds(microbatches * size / (LINE * chip.pcie))
    return f"{text}; over PCIe they take {duration} of a step there and {duration} back, during computation (modelled)"


def _pool(device: object, chip: Chip | None) -> Pool:
    """Returns the memory pool that this process has allocated on a real GPU, or that a run here would allocate."""
    pool_bytes = allocated_bytes(device) if chip else None
    if pool_bytes is None or chip is None:
        return pool_of_environment(os.environ)
    return Pool(share=min(1.0, pool_bytes / chip.visible_memory), why="as this process did")
