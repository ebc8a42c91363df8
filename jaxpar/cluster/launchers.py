"""The environment variables of each launcher: how many processes there are, and where the first one is.

A reader returns a dict with some of coordinator, processes, process, local and devices, and adds problems to a list.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.cluster.hostlist import hosts
from jaxpar.errors import JaxparError, Problem

Environment = Mapping[str, str]
Said = dict[str, Any]
OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST")  # any one shows that `srun` started the process
WAY_OUT = "JAXPAR_COORDINATOR=HOST:PORT, JAXPAR_PROCESSES=4 and JAXPAR_PROCESS=0..3; JAXPAR_PROCESSES=1 to train alone"
# The port follows from the number of the job, so that all processes compute the same one and two jobs on a host differ.
# These are the last ports, above those that Linux gives out by itself (32768-60999)
FIRST, PORTS = 61440, 4096


@dataclass(frozen=True)
class Launcher:
    """A launcher: the variables by which it is recognised, and the function that reads them.

    Attributes:
      marks: Variables, of which any one shows that this launcher may have started the process.
      reader: (environment, JAXPAR_* that are set, problems to add to) to the values that it sets.
      complete: Groups of variables: one of each group is set wherever it did start the process.
    """

    marks: tuple[str, ...]
    reader: Callable[[Environment, Mapping[str, str], list[Problem]], Said]
    complete: tuple[tuple[str, ...], ...] = ()

    def started(self, environment: Environment) -> bool:
        """Returns whether one of the launcher's variables is set."""
        return any(environment.get(mark) for mark in self.marks)

    def is_complete(self, environment: Environment) -> bool:
        """Returns whether all variables are set by which it is told from a leftover in a script or an image."""
        return self.started(environment) and all(any(map(environment.get, group)) for group in self.complete)

    def read(self, environment: Environment, own: Mapping[str, str]) -> tuple[Said, list[Problem]]:
        """Returns the values that the launcher sets, and the problems with its variables."""
        problems: list[Problem] = []
        said = self.reader(environment, own, problems)
        return {what: value for what, value in said.items() if value is not None}, problems


def number(environment: Environment, name: str, rule: str, problems: list[Problem], *, low: int = 0) -> int | None:
    """Returns the whole number that a variable must hold, or None after adding a problem."""
    text = environment.get(name, "")
    if re.fullmatch(r"\d{1,9}", text, re.ASCII) and int(text) >= low:
        return int(text)
    # no number to copy: the same one in all processes would make each of them process 0
    problems.append(Problem(f"{name}={text!r:.40}" if text else f"no {name}", rule, WAY_OUT))
    return None


def _world(environment: Environment, names: tuple[str, str], who: str, problems: list[Problem]) -> Said:
    """Returns how many processes there are and which this is, by the variables of those names."""
    processes = number(environment, names[0], f"{who} sets it: how many processes there are", problems, low=1)
    process = number(environment, names[1], f"{who} sets it: which process this is, from 0", problems)
    return {"processes": processes, "process": process}


def _check_ranks(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> None:
    """Adds a problem where RANK, set by a script, is another number than that of srun's task.

    Under a torchrun that srun started they may differ: it numbers its own processes, and sets TORCHELASTIC_RUN_ID.
    """
    rank, task, world = (environment.get(name, "") for name in ("RANK", "SLURM_PROCID", "WORLD_SIZE"))
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "")
    same = not world or (world == tasks and not environment.get("TORCHELASTIC_RUN_ID"))
    if "process" not in own and same and rank and task and any(map(environment.get, STEP)) and rank != task:
        got, rule = (
            f"RANK={rank:.20} in task {task:.20} of srun",
            "srun's tasks are the processes: SLURM_PROCID is RANK",
        )
        problems.append(Problem(got, rule, "unset RANK, before srun in the batch script"))


def _optional(environment: Environment, name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _one_each(environment: Environment, local: int | None, several: bool) -> tuple[int, ...] | None:
    """Returns the accelerator of a process that shares its machine, or None for all that it sees."""
    # a launcher that already restricts each process to one GPU numbers it 0 there: the local rank would be no device
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if local is None or not several or (visible is not None and len(visible.split(",")) == 1):
        return None
    return (local,)


def _torchrun(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> Said:
    """Reads torchrun's variables; where torchrun uses MASTER_PORT for its own store, process 0 takes the next port."""
    said = _world(environment, ("WORLD_SIZE", "RANK"), "torchrun", problems)
    _check_ranks(environment, own, problems)
    local, beside = _optional(environment, "LOCAL_RANK"), _optional(environment, "LOCAL_WORLD_SIZE")
    said |= {"local": local, "devices": _one_each(environment, local, beside is None or beside > 1)}
    if "coordinator" in own or said["processes"] == 1:
        return said
    host = environment.get("MASTER_ADDR", "")
    if not host:
        problems.append(Problem("no MASTER_ADDR", "torchrun sets it: the host of process 0", WAY_OUT))
    port = number(environment, "MASTER_PORT", "torchrun sets it: a port on the host of process 0", problems, low=1)
    if host and port is not None:
        # torchrun itself listens on MASTER_PORT, unless another rendezvous backend does
        taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        said["coordinator"] = f"[{host}]:{port + taken}" if ":" in host else f"{host}:{port + taken}"
    return said


def _open_mpi(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> Said:
    """Reads Open MPI's variables; the coordinator is the host of mpirun, where process 0 runs unless mapped elsewhere.

    Open MPI 4 names that host in `OMPI_MCA_orte_hnp_uri`, 5 in the name of its namespace, `prterun-HOST-PID@1`.
    """
    said = _world(environment, OMPI, "mpirun", problems)
    local = _optional(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
    beside = _optional(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    said |= {"local": local, "devices": _one_each(environment, local, beside is None or beside > 1)}
    if "coordinator" in own or said["processes"] == 1:
        return said
    old = re.match(r"(\d+)\.\d+;(?:.*?;)?tcp6?://(\[[^\],]+|[^:,;\[]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    new = re.fullmatch(r"(?:prterun|prte|mpirun)-(.+)-(\d+)@\d+", environment.get("PMIX_NAMESPACE", ""))
    if old:
        host = f"{old[2]}]" if old[2].startswith("[") else old[2]
        said["coordinator"] = f"{host}:{FIRST + int(old[1]) // 4096 % PORTS}"
    elif new:
        here = beside is not None and beside == said["processes"]  # on one machine its loopback is enough
        said["coordinator"] = f"{'127.0.0.1' if here else new[1]}:{FIRST + int(new[2]) % PORTS}"
    else:
        rule = "OMPI_MCA_orte_hnp_uri or PMIX_NAMESPACE says where mpirun runs"
        fix = "mpirun -x JAXPAR_COORDINATOR=HOST:PORT ..., HOST the first of its hosts"
        problems.append(Problem("mpirun, which does not say where process 0 is", rule, fix))
    return said


def _slurm(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> Said:
    """Reads SLURM's variables for a process that `srun` started.

    A batch script itself has the job's variables too, but is not one of its tasks: if it trained as process 0 it would
    wait for others that nobody starts, so that is a problem.
    """
    step = next((environment[name] for name in ("SLURM_STEP_ID", "SLURM_STEPID") if environment.get(name)), None)
    nodes = next((environment[name] for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
                  if environment.get(name)), "")  # fmt: skip
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "")
    if not step and not environment.get("SLURM_STEP_NODELIST"):
        # an allocation alone, by sbatch or salloc: a single process in it trains alone
        if tasks.isdecimal() and int(tasks) > 1 and environment.get("SLURM_PROCID"):
            problems.append(Problem(f"a SLURM job of {tasks} tasks, this process is none of them", "srun starts the "
                "tasks of a job", "srun jaxpar train JOB, or JAXPAR_PROCESSES=1 to train alone"))  # fmt: skip
        return {}
    count = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    said = _world(environment, (count, "SLURM_PROCID"), "srun", problems)
    _check_ranks(environment, own, problems)
    local, total = _optional(environment, "SLURM_LOCALID"), said["processes"] or 1
    machines = _optional(environment, "SLURM_STEP_NUM_NODES") or _optional(environment, "SLURM_NNODES")
    said |= {"local": local, "devices": _one_each(environment, local, total > (machines or 1))}
    if "coordinator" in own or total == 1:
        return said
    job = number(environment, "SLURM_JOB_ID", "SLURM sets it: the port follows from it", problems)
    if not nodes:
        problems.append(Problem("no SLURM_STEP_NODELIST", "srun sets it: the first host has process 0", WAY_OUT))
    elif job is not None:
        try:  # a step more is a port more, so that two steps of a job can run side by side
            said["coordinator"] = f"{next(hosts(nodes))}:{FIRST + (job + 521 * (_digits(step))) % PORTS}"
        except JaxparError as error:
            problems.extend(error.problems)
    return said


def _digits(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _kubernetes(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> Said:
    """Reads the index of a pod of an indexed job; the job itself must set the count and the headless service.

    A `JAXPAR_COORDINATOR` of one word is that service: pod 0 of the job JOB is JOB-0.SERVICE, and this pod's own name
    is JOB-INDEX.
    """
    fix = "JAXPAR_PROCESSES = completions and JAXPAR_COORDINATOR = the headless service; configs/launch/kubernetes.yaml"
    index = number(environment, "JOB_COMPLETION_INDEX", "Kubernetes sets it: which pod this is, from 0", problems)
    missing = [name for name in ("JAXPAR_PROCESSES", "JAXPAR_COORDINATOR") if not environment.get(name)]
    if missing:
        problems.append(Problem(f"JOB_COMPLETION_INDEX without {' and '.join(missing)}", "an indexed job says how many "
            "pods there are, and where pod 0 is", f"{fix}; JAXPAR_PROCESSES=1 to train alone"))  # fmt: skip
        return {"process": index}
    said: Said = {"process": index}
    service, pod = own["coordinator"], environment.get("HOSTNAME", "")
    # without a dot or a colon it is a service of the cluster, and pod 0 is reached through it
    if re.fullmatch(r"[a-z0-9-]+", service) and service != "localhost":
        if index is not None and pod.endswith(f"-{index}"):
            said["coordinator"] = f"{pod.removesuffix(f'-{index}')}-0.{service}"
        else:
            rule = "a coordinator of one word is the service of a job whose pods are called JOB-INDEX"
            got = f"JAXPAR_COORDINATOR={service}, HOSTNAME={pod!r:.60}"
            problems.append(Problem(got, rule, "JAXPAR_COORDINATOR=JOB-0.SERVICE:8476"))
    return said


LAUNCHERS = {
    # MASTER_ADDR and MASTER_PORT are no marks: batch scripts and container images export them for any launcher
    "torchrun": Launcher(("RANK", "WORLD_SIZE"), _torchrun, (("RANK",), ("WORLD_SIZE",))),
    "Open MPI": Launcher((*OMPI,), _open_mpi, tuple((name,) for name in OMPI)),
    "SLURM": Launcher(("SLURM_JOB_ID",), _slurm, (STEP,)),
    "Kubernetes": Launcher(("JOB_COMPLETION_INDEX",), _kubernetes),
}  # the innermost first: mpirun or torchrun may run inside a step of SLURM, and all of them in a pod
