"""Runs all checks in turn while a child process probes the devices."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem
from jaxpar.job.doctor import devices, machine, network, software
from jaxpar.job.doctor.finding import Finding, with_time_limit
from jaxpar.job.file.parse import load_with_problems
from jaxpar.job.file.schema import Job

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
    probe = devices.start(environment, simulate=local_devices)
    folder = Path(job.run.dir) if job and job.run.dir else Path()
    findings += [software.versions(), software.plugin(), software.toolkit()]
    findings += [*software.variables(environment, simulate=simulate), *cluster_findings]
    if cluster:
        check, fix = (
            partial(network.check_connection, cluster, seconds=MEETING, folder=folder),
            f"getent hosts {cluster.host} shows whether its name is known here; if not, its address",
        )
        findings += with_time_limit("coordinator", check, seconds=MEETING + 2, fix=fix)
    gpus = software.DRIVER.exists() and not simulate
    findings += [
        *with_time_limit("run folder", lambda: [machine.folder_clock(folder)], seconds=2, fix=SERVER),
        machine.shared_memory(gpus=gpus), machine.open_files(), machine.core_dumps(),
        machine.cores(simulate=simulate), machine.threads(simulate=simulate), machine.huge_pages(simulate=simulate),
    ]  # fmt: skip
    device_finding, count = devices.finish(probe, seconds=seconds)
    findings.append(device_finding)
    total = count * (cluster.processes if cluster else 1)
    if job is None:
        return [*findings, *_disk(folder)]
    fits, size = _job(job, total)
    checkpoints = job.checkpoint.keep_last + job.checkpoint.keep_best + 1
    return [*findings, *fits, *_disk(folder, state=size, kept=checkpoints)]


def _disk(folder: Path, *, state: int = 0, kept: int = 1) -> list[Finding]:
    return with_time_limit("disk", lambda: [machine.disk(folder, state=state, checkpoints=kept)], seconds=2, fix=SERVER)


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
