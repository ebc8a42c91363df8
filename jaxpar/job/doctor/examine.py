"""Runs all checks in turn while a child process probes the devices."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from jaxpar.errors import JaxparError, Problem
from jaxpar.job.doctor import network, packages, this_machine
from jaxpar.job.doctor.this_machine import Finding, with_time_limit
from jaxpar.job.file.parse import load_with_problems
from jaxpar.job.file.schema import Job

# Probes the devices in a child process, which may hang or crash without harm.

PROBE = """
import json, sys
simulated = int(sys.argv[1])
if simulated:
    from jaxpar.mesh.devices import simulate
    simulate(simulated)
import jax
from jaxpar.mesh.devices import visible_devices
visible_devices()
devices = jax.local_devices()
jax.block_until_ready(jax.numpy.ones(8) + 1)
limits = [stats["bytes_limit"] for d in devices if (stats := d.memory_stats()) and "bytes_limit" in stats]
print(json.dumps({"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform,
                  "bytes": min(limits, default=0)}))
"""


@dataclass(frozen=True)
class Probe:
    """A child process that probes the devices.

    Attributes:
      process: The process.
      out: Its standard output.
      err: Its standard error, with XLA's messages.
      start_time: Start time by `time.monotonic`.
      environment: Its environment variables.
    """

    process: subprocess.Popen
    out: IO[str]
    err: IO[str]
    start_time: float
    environment: Mapping[str, str]


def start_probe(environment: Mapping[str, str], *, simulate: int, code: str = PROBE) -> Probe:
    """Starts the probe with this number of simulated devices; 0 probes the real devices."""
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # no pipes: a grandchild may keep them open
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(simulate)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        env=dict(environment), start_new_session=True,
    )  # fmt: skip
    return Probe(process, out, err, time.monotonic(), environment)


def finish_probe(probe: Probe, *, seconds: float) -> tuple[Finding, int]:
    """Returns the probe's finding and the device count; kills it `seconds` after its start."""
    with probe.out, probe.err:
        return _finish_probe(probe, seconds)


def _finish_probe(probe: Probe, seconds: float) -> tuple[Finding, int]:
    try:
        code = probe.process.wait(max(0.05, probe.start_time + seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(probe.process.pid, signal.SIGKILL)
        try:
            probe.process.wait(1)
        except subprocess.TimeoutExpired:  # stuck in the driver, out of reach of signals: the system reaps it later
            pass
        fix = "does nvidia-smi answer, where there are GPUs? Or a busy machine: try again"
        return Finding("devices", "problem", f"no answer within {seconds:g} s", fix), 0
    out, err = _read_output(probe.out), _read_output(probe.err)
    if code == 0:
        return _parse_report(json.loads(out.splitlines()[-1]))
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", err)
    flags = probe.environment.get("XLA_FLAGS", "")
    if unknown or ("flag" in err.lower() and "XLA_FLAGS" in err):
        flag = unknown[1].strip()[:200] if unknown else flags[:200]
        return Finding("XLA_FLAGS", "problem", f"XLA ends the process: it does not know {flag}", "take it out of "
            "XLA_FLAGS; flags come and go with the version of jaxlib"), 0  # fmt: skip
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"status {code}")
    fix = "what that line says; python -c 'import jax; jax.devices()' shows all of it"
    return Finding("devices", "problem", f"JAX finds no devices: {last[:300]}", fix), 0


def _read_output(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _parse_report(found: dict[str, Any]) -> tuple[Finding, int]:
    from jaxpar.units import show_bytes

    simulated = " (simulated)" if found["platform"] == "cpu" and found["count"] > 1 else ""
    memory = f", {show_bytes(found['bytes'])} each" if found["bytes"] else ""
    return Finding("devices", "ok", f"{found['count']} x {found['kind']}{simulated}{memory}"), found["count"]


DEVICES, MEETING = 10.0, 3.0  # seconds: together with the rest below 15
SERVER = "a run.dir on a file server that answers"


def examine(
    path: str = "", overrides: Sequence[str] = (), *, environment: Mapping[str, str], seconds: float = DEVICES
) -> list[Finding]:
    """Returns the findings on this machine, and on a job that is to run here.

    Args:
      path: The job file, or "" for the machine alone.
      overrides: `section.key=value` strings.
      environment: Environment variables, such as `os.environ`.
      seconds: Time limit of the device probe.
    """
    job, findings = _read(path, overrides) if path else (None, [])
    simulate = job.mesh.simulate if job else 0
    cluster_findings, cluster = network.processes(environment)
    local_devices = max(1, simulate // cluster.processes) if cluster and simulate else simulate
    probe = start_probe(environment, simulate=local_devices)
    folder = Path(job.run.dir) if job and job.run.dir else Path()
    findings += [packages.versions(), packages.plugin(), packages.toolkit()]
    findings += [*packages.variables(environment, simulate=simulate), *cluster_findings]
    if cluster:
        check, fix = (
            partial(network.check_connection, cluster, seconds=MEETING, folder=folder),
            f"getent hosts {cluster.host} shows whether its name is known here; if not, its address",
        )
        findings += with_time_limit("coordinator", check, seconds=MEETING + 2, fix=fix)
    gpus = packages.DRIVER.exists() and not simulate
    findings += [
        *with_time_limit("run folder", lambda: [this_machine.folder_clock(folder)], seconds=2, fix=SERVER),
        this_machine.shared_memory(gpus=gpus), this_machine.open_files(), this_machine.core_dumps(),
        this_machine.cores(simulate=simulate), this_machine.threads(simulate=simulate),
        this_machine.huge_pages(simulate=simulate),
    ]  # fmt: skip
    device_finding, count = finish_probe(probe, seconds=seconds)
    findings.append(device_finding)
    total = count * (cluster.processes if cluster else 1)
    if job is None:
        return [*findings, *_disk(folder)]
    fits, size = _job(job, total)
    checkpoints = job.checkpoint.keep_last + job.checkpoint.keep_best + 1
    return [*findings, *fits, *_disk(folder, state=size, kept=checkpoints)]


def _disk(folder: Path, *, state: int = 0, kept: int = 1) -> list[Finding]:
    return with_time_limit(
        "disk", lambda: [this_machine.disk(folder, state=state, checkpoints=kept)], seconds=2, fix=SERVER
    )


def _read(path: str, overrides: Sequence[str]) -> tuple[Job | None, list[Finding]]:
    try:
        job, problems = load_with_problems(path, overrides)
    except JaxparError as error:
        return None, _problem_findings(error.problems)
    return job, _problem_findings(problems)


def _problem_findings(problems: Sequence[Problem]) -> list[Finding]:
    return [Finding("job", "problem", f"{problem.got} (rule: {problem.rule})", problem.fix) for problem in problems]


def _job(job: Job, count: int) -> tuple[list[Finding], int]:
    """Composes the job on `count` devices; returns the finding and the bytes of its training state."""
    if not count:
        return [], 0
    import jax

    from jaxpar.job.parts.models import resolve_loss, resolve_model
    from jaxpar.job.parts.optimizers import resolve_optimizer
    from jaxpar.mesh.devices import use_cpu_only
    from jaxpar.parallel.compose import compose
    from jaxpar.step.state import abstract

    use_cpu_only()  # only shapes are needed here: JAX leaves the devices alone
    device_count = job.mesh.devices or count
    if device_count > count:
        text = f"mesh.devices = {device_count}, {count} are seen"
        return [Finding("job", "problem", text, f"mesh.devices = {count}, or more processes")], 0
    try:
        layout = compose(resolve_model(job, resolve_loss(job)), job.effective_parallel, device_count)
    except JaxparError as error:
        return _problem_findings(error.problems), 0
    leaves: list[Any] = jax.tree.leaves(abstract(layout, resolve_optimizer(job, layout.blueprint)))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return [Finding("job", "ok", f"{layout.summary()}")], size
