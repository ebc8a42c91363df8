"""What XLA's options do to the communication of jobs for many GPUs, as compiled for GPUs that need not be there.

    job x option ─► compiled ─► replayed on the timeline ─► seconds of the step, and those of exposed communication

Nothing is run, and every time is modelled. Jobs are those under configs/ with fewer layers, so that a program compiles
in some seconds; each is compiled in a process of its own, and an option that ends that process is left out, and said.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, refuse, suggest
from jaxpar.hlo.text import parse
from jaxpar.inspector.compiled import compile_program
from jaxpar.inspector.subject import step_subject
from jaxpar.inspector.timeline import replay
from jaxpar.job.build import assemble
from jaxpar.job.file.parse import load
from jaxpar.job.file.schema import MeshTable
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.measure.record import commit, versions
from jaxpar.mesh.absent_gpus import target_devices
from jaxpar.mesh.collective import KINDS
from jaxpar.mesh.target import parse_target
from jaxpar.mesh.xla import OVERLAPPED, SMALL, dropped_option_warning
from jaxpar.units import show_bytes, show_seconds

from .command import environment

FOLDER = Path("configs")
JOBS: Mapping[str, tuple[str, ...]] = {  # name to file and overrides
    "data 8, 124M": (
        "gpu_gpt2_124m", "model.layers=4", "mesh.devices=8", "mesh.target=h100:1x8", "parallel.data=8",
        "train.accumulate=2"),
    "fsdp 8, 1.3B": ("gpu_llama_1b3_fsdp8", "model.layers=4", "train.accumulate=2", "train.global_batch=128"),
    "fsdp 8, 8B": ("gpu_llama_8b_fsdp8", "model.layers=4", "train.accumulate=2", "train.global_batch=32"),
    "data 4 x fsdp 8, 8B": (
        "gpu_llama_8b_fsdp8", "model.layers=4", "mesh.devices=32", "mesh.target=h100:4x8", "parallel.data=4",
        "train.accumulate=2", "train.global_batch=128"),
    "fsdp 8 x tensor 8, 70B": (
        "gpu_llama_70b_fsdp128_tensor8", "model.layers=4", "mesh.target=h100:8x8", "parallel.fsdp=8",
        "train.global_batch=8"),
    "pipe 4 x fsdp 4 x tensor 8, 405B": (
        "gpu_llama_405b_pipe16_fsdp4_tensor8", "model.layers=8", "parallel.pipe=4", "mesh.target=h100:16x8",
        "parallel.pipeline.layers=[]", "parallel.pipeline.microbatches=16", "train.global_batch=64"),
}  # fmt: skip
COMBINE = tuple(f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_gather", "reduce_scatter", "all_reduce"))
O1 = {"optimization_level": "O1"}
PRESET = {option.name: option.value for option in OVERLAPPED}
WAYS: Mapping[str, Mapping[str, Any]] = {  # what XLA is told
    "plain": {},
    "preset": PRESET,
    "combine 8 MiB": dict.fromkeys(COMBINE, SMALL),
    "combine 2 MiB": dict.fromkeys(COMBINE, SMALL // 4),
    "combine 128 MiB": dict(zip(COMBINE, (16 * SMALL, 8 * SMALL, 16 * SMALL), strict=True)),  # as MaxText's recipes do
    "collective matmul": {
        "xla_gpu_threshold_for_windowed_einsum_mib": 0, "xla_gpu_multi_streamed_windowed_einsum": True},
    "O1": O1,
    "O1, combine 8 MiB": O1 | dict.fromkeys(COMBINE, SMALL),
    "double buffering": {"xla_gpu_enable_while_loop_double_buffering": True},
    "pipelined gathers": {"xla_gpu_enable_pipelined_all_gather": True},
    "no latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": False},
}  # fmt: skip


def collectives(*, jobs: Sequence[str] = tuple(JOBS), ways: Sequence[str] = tuple(WAYS)) -> dict[str, Any]:
    """Compiles each job in each way, prints a table, and returns it with what it was made with.

    Raises:
      JaxparError: If there is no such job, or no configs/ in the working directory.
    """
    for name in jobs:
        if name not in JOBS:
            raise refuse(f"--only {name!r:.60}", rule="a job of the bench has a name", fix=suggest(name, JOBS))
    if not FOLDER.is_dir():
        raise refuse(f"no folder {FOLDER}/ here", rule="jobs are those of the repository", fix="cd to its root")
    table: dict[str, dict[str, Any]] = {}
    for name in jobs:
        print(f"\n{name}\n{'':<20}{'step':>10}{'exposed':>10}{'temporary':>12}{'collectives':>13}{'compiling':>11}")
        table[name] = {}
        for way, row in _rows(name, ways):
            table[name][way] = row
            print(f"{way:<20}{_shown(row)}", flush=True)
    return {"jobs": {name: JOBS[name] for name in jobs}, "ways": {way: WAYS[way] for way in ways}, "table": table,
            "versions": versions(), "commit": commit()}  # fmt: skip


def _shown(row: Mapping[str, Any]) -> str:
    if "absent" in row:
        return f"  {row['absent']}"
    times = "".join(f"{show_seconds(row[key]):>10}" for key in ("seconds", "exposed_seconds"))
    return f"{times}{show_bytes(row['temporary_bytes']):>12}{row['collectives']:>13}{row['compiling_seconds']:>9.0f} s"


def _rows(name: str, ways: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (way, row), compiled in a process; where that ends, the next one goes on after the way that ended it."""
    left = list(ways)
    while left:
        command = [sys.executable, "-m", "bench.collectives", "--one", name, *left]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
        ) as process:
            for line in process.stdout or ():
                yield left.pop(0), json.loads(line)
        if left:
            yield left.pop(0), {"absent": f"the process ended with {process.returncode}"}


def _compiled(name: str, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields what becomes of a job in each way."""
    config, *overrides = JOBS[name]
    job = load(str(FOLDER / f"{config}.toml"), overrides)
    target = parse_target(job.mesh.target)
    job = replace(job, mesh=MeshTable(devices=target.devices))
    devices = target_devices(target)
    step = assemble(job, devices)
    subject = step_subject(step, abstract_batch(job))
    sizes = {str(axis): size for axis, size in subject.mesh.shape.items()}
    for way in ways:
        try:
            found = compile_program(subject.lowered, devices, compiler_options=WAYS[way])
        except JaxparError as error:
            yield {"absent": error.problems[0].got}
            continue
        if gone := [line for line in found.warned if line in map(dropped_option_warning, WAYS[way])]:
            yield {"absent": gone[0]}
            continue
        module = parse(found.text)
        timeline = replay(module, sizes, target.chip, target.per_node)
        yield {
            "seconds": timeline.seconds,
            "exposed_seconds": sum(timeline.exposed.values()),
            "communication_seconds": sum(timeline.communication.values()),
            "exposed": timeline.exposed,
            "temporary_bytes": found.temporary,
            "collectives": sum(op.opcode.removesuffix("-start") in KINDS for _, op in module.ops()),
            "compiling_seconds": found.seconds,
        }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        for row in _compiled(sys.argv[2], sys.argv[3:]):
            print(json.dumps(row), flush=True)
    else:
        from .command import main

        raise SystemExit(main("collectives"))
