"""Reads the environment variables of each launcher: the number of processes, and the address of process 0.

A reader returns a dict with some of coordinator, processes, process, local and devices, and adds problems to a list.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import JaxparError, Problem, refuse

# Expands SLURM's host lists: node[01-03,07],gpu5.


def hosts(text: str) -> Iterator[str]:
    """Yields the hosts of a node list in order; it is a generator, because a short list may stand for millions.

    >>> list(hosts("node[01-03,07],gpu5"))
    ['node01', 'node02', 'node03', 'node07', 'gpu5']
    >>> list(hosts("rack[1-2]n[8-9]-ib"))
    ['rack1n8-ib', 'rack1n9-ib', 'rack2n8-ib', 'rack2n9-ib']

    Raises:
      JaxparError: If a host cannot be parsed; names the first one.
    """
    for name in re.split(r",(?![^\[]*\])", text.strip()):
        if not re.fullmatch(r"([\w.-]|\[[\d,-]+\])+", name, re.ASCII):
            raise _no_list(text, f"{name!r} is no host")
        yield from _expand(re.split(r"\[([^\]]*)\]", name), text)


def _expand(parts: list[str], text: str) -> Iterator[str]:
    """Yields every host of [name, ranges, name, ranges, ..., name]."""
    if len(parts) == 1:
        yield parts[0]
        return
    for number in _numbers(parts[1], text):
        for suffix in _expand(parts[2:], text):
            yield f"{parts[0]}{number}{suffix}"


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise _no_list(text, f"[{piece}] is no range")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield str(number).zfill(len(match[1]))  # node[08-10]: all numbers have the width of the first


def _no_list(text: str, why: str) -> JaxparError:
    return refuse(
        f"the node list {text!r:.80}: {why}",
        rule="hosts are written as SLURM does: node[01-03,07],gpu5",
        fix="JAXPAR_COORDINATOR=HOST:PORT of process 0, which needs no node list",
    )


Environment = Mapping[str, str]
Said = dict[str, Any]
OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST")  # any of them shows that `srun` started the process
WAY_OUT = "JAXPAR_COORDINATOR=HOST:PORT, JAXPAR_PROCESSES=4 and JAXPAR_PROCESS=0..3; JAXPAR_PROCESSES=1 to train alone"
# The port is computed from the job's number, so that all processes agree on it and two jobs on a host differ. These are
# the last ports, above those that Linux assigns itself (32768-60999)
FIRST, PORTS = 61440, 4096


@dataclass(frozen=True)
class Launcher:
    """A launcher: the variables that identify it, and the function that reads them.

    Attributes:
      marks: Variables; any of them shows that this launcher may have started the process.
      reader: Function of (environment, JAXPAR_* that are set, list for problems) that returns the values.
      required_groups: Groups of variables; the launcher sets at least one of each group in a process that it starts.
    """

    marks: tuple[str, ...]
    reader: Callable[[Environment, Mapping[str, str], list[Problem]], Said]
    required_groups: tuple[tuple[str, ...], ...] = ()

    def started(self, environment: Environment) -> bool:
        """Whether one of the launcher's variables is set."""
        return any(environment.get(mark) for mark in self.marks)

    def is_complete(self, environment: Environment) -> bool:
        """Whether enough variables are set that they cannot be left over from a script or an image."""
        return self.started(environment) and all(any(map(environment.get, group)) for group in self.required_groups)

    def read(self, environment: Environment, jaxpar_variables: Mapping[str, str]) -> tuple[Said, list[Problem]]:
        """Reads the launcher's variables; returns their values, and problems with them."""
        problems: list[Problem] = []
        values = self.reader(environment, jaxpar_variables, problems)
        return {key: value for key, value in values.items() if value is not None}, problems


def read_number(environment: Environment, name: str, rule: str, problems: list[Problem], *, low: int = 0) -> int | None:
    """Reads a whole number from a variable; adds a problem and returns None if it is none."""
    text = environment.get(name, "")
    if re.fullmatch(r"\d{1,9}", text, re.ASCII) and int(text) >= low:
        return int(text)
    # the fix shows a range, not a number to copy: the same number everywhere would make each process number 0
    problems.append(Problem(f"{name}={text!r:.40}" if text else f"no {name}", rule, WAY_OUT))
    return None


def _world(environment: Environment, names: tuple[str, str], launcher: str, problems: list[Problem]) -> Said:
    """Reads the number of processes and the number of this process, from two variables."""
    processes = read_number(
        environment, names[0], f"{launcher} sets {names[0]} to the number of processes", problems, low=1
    )
    process = read_number(environment, names[1], f"{launcher} sets {names[1]} to the index of this process", problems)
    return {"processes": processes, "process": process}


def _check_ranks(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> None:
    """Adds a problem if RANK, which a script may set, differs from the number of the task in srun.

    They may differ if srun starts torchrun, which numbers its own processes, and sets TORCHELASTIC_RUN_ID.
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


def _own_device(environment: Environment, local: int | None, several: bool) -> tuple[int, ...] | None:
    """Returns the accelerator of a process that shares its machine with others, or None for all visible ones."""
    # a launcher that restricts each process to one GPU shows it as number 0: the local rank would be no device
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if local is None or not several or (visible is not None and len(visible.split(",")) == 1):
        return None
    return (local,)


def _torchrun(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> Said:
    """Reads torchrun's variables; if torchrun uses MASTER_PORT for its own store, process 0 takes the next port."""
    values = _world(environment, ("WORLD_SIZE", "RANK"), "torchrun", problems)
    _check_ranks(environment, own, problems)
    local, local_size = _optional(environment, "LOCAL_RANK"), _optional(environment, "LOCAL_WORLD_SIZE")
    values |= {"local": local, "devices": _own_device(environment, local, local_size is None or local_size > 1)}
    if "coordinator" in own or values["processes"] == 1:
        return values
    host = environment.get("MASTER_ADDR", "")
    if not host:
        problems.append(Problem("no MASTER_ADDR", "torchrun sets MASTER_ADDR to the host of process 0", WAY_OUT))
    port = read_number(environment, "MASTER_PORT", "torchrun sets MASTER_PORT to a port of that host", problems, low=1)
    if host and port is not None:
        # torchrun itself listens on MASTER_PORT, unless another rendezvous backend does
        port_offset = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        values["coordinator"] = f"[{host}]:{port + port_offset}" if ":" in host else f"{host}:{port + port_offset}"
    return values


def _open_mpi(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> Said:
    """Reads Open MPI's variables; the coordinator is mpirun's host, where process 0 runs unless mapped elsewhere.

    Open MPI 4 names mpirun's host in `OMPI_MCA_orte_hnp_uri`, Open MPI 5 in its namespace `prterun-HOST-PID@1`.
    """
    values = _world(environment, OMPI, "mpirun", problems)
    local = _optional(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = _optional(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    values |= {"local": local, "devices": _own_device(environment, local, local_size is None or local_size > 1)}
    if "coordinator" in own or values["processes"] == 1:
        return values
    uri = re.match(r"(\d+)\.\d+;(?:.*?;)?tcp6?://(\[[^\],]+|[^:,;\[]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    pmix = re.fullmatch(r"(?:prterun|prte|mpirun)-(.+)-(\d+)@\d+", environment.get("PMIX_NAMESPACE", ""))
    if uri:
        host = f"{uri[2]}]" if uri[2].startswith("[") else uri[2]
        values["coordinator"] = f"{host}:{FIRST + int(uri[1]) // 4096 % PORTS}"
    elif pmix:
        # on one machine the loopback address suffices
        is_local = local_size is not None and local_size == values["processes"]
        values["coordinator"] = f"{'127.0.0.1' if is_local else pmix[1]}:{FIRST + int(pmix[2]) % PORTS}"
    else:
        rule = "OMPI_MCA_orte_hnp_uri or PMIX_NAMESPACE says where mpirun runs"
        fix = "mpirun -x JAXPAR_COORDINATOR=HOST:PORT ..., HOST the first of its hosts"
        problems.append(Problem("mpirun, which does not say where process 0 is", rule, fix))
    return values


def _slurm(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> Said:
    """Reads SLURM's variables for a process that `srun` started.

    The batch script itself also has the job's variables, but is not a task. As process 0 it would wait for processes
    that nobody starts, so this is a problem.
    """
    step = next((environment[name] for name in ("SLURM_STEP_ID", "SLURM_STEPID") if environment.get(name)), None)
    nodes = next((environment[name] for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
                  if environment.get(name)), "")  # fmt: skip
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "")
    if not step and not environment.get("SLURM_STEP_NODELIST"):
        # only an allocation, by sbatch or salloc: a single process in it trains alone
        if tasks.isdecimal() and int(tasks) > 1 and environment.get("SLURM_PROCID"):
            problems.append(Problem(f"a SLURM job of {tasks} tasks, this process is none of them", "srun starts the "
                "tasks of a job", "srun jaxpar train JOB, or JAXPAR_PROCESSES=1 to train alone"))  # fmt: skip
        return {}
    count = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    values = _world(environment, (count, "SLURM_PROCID"), "srun", problems)
    _check_ranks(environment, own, problems)
    local, total = _optional(environment, "SLURM_LOCALID"), values["processes"] or 1
    machines = _optional(environment, "SLURM_STEP_NUM_NODES") or _optional(environment, "SLURM_NNODES")
    values |= {"local": local, "devices": _own_device(environment, local, total > (machines or 1))}
    if "coordinator" in own or total == 1:
        return values
    job = read_number(environment, "SLURM_JOB_ID", "SLURM sets it: the port follows from it", problems)
    if not nodes:
        problems.append(Problem("no SLURM_STEP_NODELIST", "srun sets it: the first host has process 0", WAY_OUT))
    elif job is not None:
        try:  # each step uses the next port, so that two steps of a job can run side by side
            values["coordinator"] = f"{next(hosts(nodes))}:{FIRST + (job + 521 * (_digits(step))) % PORTS}"
        except JaxparError as error:
            problems.extend(error.problems)
    return values


def _digits(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _kubernetes(environment: Environment, own: Mapping[str, str], problems: list[Problem]) -> Said:
    """Reads the index of a pod of an indexed job; the job's manifest must set the count and the headless service.

    A `JAXPAR_COORDINATOR` of one word is that service: pod 0 of the job JOB is JOB-0.SERVICE, and this pod is named
    JOB-INDEX.
    """
    fix = "JAXPAR_PROCESSES = completions and JAXPAR_COORDINATOR = the headless service; deploy/kubernetes.yaml"
    index = read_number(environment, "JOB_COMPLETION_INDEX", "Kubernetes sets it: which pod this is, from 0", problems)
    missing = [name for name in ("JAXPAR_PROCESSES", "JAXPAR_COORDINATOR") if not environment.get(name)]
    if missing:
        problems.append(Problem(f"JOB_COMPLETION_INDEX without {' and '.join(missing)}", "an indexed job says how many "
            "pods there are, and where pod 0 is", f"{fix}; JAXPAR_PROCESSES=1 to train alone"))  # fmt: skip
        return {"process": index}
    values: Said = {"process": index}
    service, pod = own["coordinator"], environment.get("HOSTNAME", "")
    # without a dot or a colon it is a Kubernetes service, through which pod 0 is reached
    if re.fullmatch(r"[a-z0-9-]+", service) and service != "localhost":
        if index is not None and pod.endswith(f"-{index}"):
            values["coordinator"] = f"{pod.removesuffix(f'-{index}')}-0.{service}"
        else:
            rule = "a coordinator of one word is the service of a job whose pods are called JOB-INDEX"
            got = f"JAXPAR_COORDINATOR={service}, HOSTNAME={pod!r:.60}"
            problems.append(Problem(got, rule, "JAXPAR_COORDINATOR=JOB-0.SERVICE:8476"))
    return values


# launchers that jaxpar does not support, to the variables by which it recognizes them: the number of processes, the
# index of this process, and further ones
UNSUPPORTED_LAUNCHERS = {
    "MPICH or Intel MPI": ("PMI_SIZE", "PMI_RANK"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    "Flux": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    "SkyPilot": ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    "Kubeflow's JAXJob": ("NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS"),
}


def unsupported_launcher(environment: Environment) -> Problem | None:
    """Reports that a launcher which is not read has started several processes; each would train alone."""
    for launcher, names in UNSUPPORTED_LAUNCHERS.items():
        count = environment.get(names[0], "")
        if all(map(environment.get, names)) and count.isdecimal() and int(count) > 1:
            address = f"${names[2]}" if names[2:] else "HOST:8476"
            variables = f"JAXPAR_PROCESSES=${names[0]} JAXPAR_PROCESS=${names[1]} JAXPAR_COORDINATOR={address}"
            return Problem(
                f"{names[0]}={count:.20}, {names[1]}={environment[names[1]]:.20}, of {launcher}",
                f"jaxpar reads {', '.join(LAUNCHERS)} and its own variables; each of these processes would train alone",
                f"sh -c '{variables} exec jaxpar train JOB' as the command of each"
                + ", HOST that of process 0" * (not names[2:])
                + "; JAXPAR_PROCESSES=1 to train alone",
            )
    return None


LAUNCHERS = {
    # MASTER_ADDR and MASTER_PORT identify no launcher: batch scripts and container images export them for any
    "torchrun": Launcher(("RANK", "WORLD_SIZE"), _torchrun, (("RANK",), ("WORLD_SIZE",))),
    "Open MPI": Launcher((*OMPI,), _open_mpi, tuple((name,) for name in OMPI)),
    "SLURM": Launcher(("SLURM_JOB_ID",), _slurm, (STEP,)),
    "Kubernetes": Launcher(("JOB_COMPLETION_INDEX",), _kubernetes),
}  # the innermost first: mpirun or torchrun may run inside a step of SLURM, and all of them in a pod
