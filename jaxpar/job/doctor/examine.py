"""All checks, one after the other, while the devices are looked at beside them."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem
from jaxpar.job.doctor import devices, machine, network, software
from jaxpar.job.doctor.finding import Finding, limited
from jaxpar.job.file.parse import read
from jaxpar.job.file.schema import Job

DEVICES, MEETING = 10.0, 3.0  # seconds, so that all of it stays below 15
SERVER = "a run.dir on a file server that answers"


def examine(
    path: str = "", overrides: Sequence[str] = (), *, environment: Mapping[str, str], seconds: float = DEVICES
) -> list[Finding]:
    """Returns the findings on a machine that is meant to run a job.

    Args:
      path: The job file, or "" to look at the machine alone.
      overrides: `section.key=value`.
      environment: Such as `os.environ`.
      seconds: After which the devices are given up.
    """
    job, found = _read(path, overrides) if path else (None, [])
    simulate = job.mesh.simulate if job else 0
    others, cluster = network.processes(environment)
    each = max(1, simulate // cluster.processes) if cluster and simulate else simulate
    probe = devices.start(environment, simulate=each)
    folder = Path(job.run.dir) if job and job.run.dir else Path()
    found += [software.versions(), software.plugin(), software.toolkit()]
    found += [*software.variables(environment, simulate=simulate), *others]
    if cluster:
        meet, names = (
            partial(network.meet, cluster, seconds=MEETING, folder=folder),
            f"getent hosts {cluster.host} shows whether its name is known here; if not, its address",
        )
        found += limited("coordinator", meet, seconds=MEETING + 2, fix=names)
    gpus = software.DRIVER.exists() and not simulate
    found += [
        *limited("run folder", lambda: [machine.folder_clock(folder)], seconds=2, fix=SERVER),
        machine.shared_memory(gpus=gpus), machine.open_files(), machine.core_dumps(),
        machine.cores(simulate=simulate), machine.threads(simulate=simulate), machine.huge_pages(simulate=simulate),
    ]  # fmt: skip
    seen, count = devices.finish(probe, seconds=seconds)
    found.append(seen)
    total = count * (cluster.processes if cluster else 1)
    if job is None:
        return [*found, *_disk(folder)]
    fits, size = _job(job, total)
    kept = job.checkpoint.keep_last + job.checkpoint.keep_best + 1
    return [*found, *fits, *_disk(folder, state=size, kept=kept)]


def _disk(folder: Path, *, state: int = 0, kept: int = 1) -> list[Finding]:
    return limited("disk", lambda: [machine.disk(folder, state=state, kept=kept)], seconds=2, fix=SERVER)


def _read(path: str, overrides: Sequence[str]) -> tuple[Job | None, list[Finding]]:
    try:
        job, problems = read(path, overrides)
    except JaxparError as error:
        return None, _wrong(error.problems)
    return job, _wrong(problems)


def _wrong(problems: Sequence[Problem]) -> list[Finding]:
    return [Finding("job", "problem", f"{problem.got} (rule: {problem.rule})", problem.fix) for problem in problems]


def _job(job: Job, count: int) -> tuple[list[Finding], int]:
    """Returns whether the job fits the devices that were seen, and the bytes of its state."""
    if not count:
        return [], 0
    import jax

    from jaxpar.job.parts.models import resolve_loss, resolve_model
    from jaxpar.job.parts.optimizers import resolve_optimizer
    from jaxpar.mesh.devices import leave_alone
    from jaxpar.parallel.compose import compose
    from jaxpar.step.state import abstract

    leave_alone()  # shapes alone: the devices stay with the process that looked at them
    use = job.mesh.devices or count
    if use > count:
        text = f"mesh.devices = {use}, {count} are seen"
        return [Finding("job", "problem", text, f"mesh.devices = {count}, or more processes")], 0
    try:
        layout = compose(resolve_model(job, resolve_loss(job)), job.declared, use)
    except JaxparError as error:
        return _wrong(error.problems), 0
    leaves: list[Any] = jax.tree.leaves(abstract(layout, resolve_optimizer(job, layout.blueprint)))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return [Finding("job", "ok", f"{layout.summary()}")], size
