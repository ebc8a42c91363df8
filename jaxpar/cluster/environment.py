"""Reads the processes of a run from a launcher's environment variables; does not connect.

JAXPAR_*                 jaxpar launch, or by hand    each variable that is set takes precedence
RANK, WORLD_SIZE, ...    torchrun                  ─┐
OMPI_COMM_WORLD_*        mpirun                     ├─► the first launcher found provides the rest ─► Cluster
SLURM_*                  srun                       │
JOB_COMPLETION_INDEX     Kubernetes' indexed jobs  ─┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.cluster.launchers import LAUNCHERS, WAY_OUT, Said, read_number, unsupported_launcher
from jaxpar.errors import JaxparError, Problem, refuse

PORT = 8476  # default port of the coordinator, as in JAX on Kubernetes
OWN = {"coordinator": "JAXPAR_COORDINATOR", "processes": "JAXPAR_PROCESSES", "process": "JAXPAR_PROCESS"}
MEANS = {
    "coordinator": "the coordinator is HOST:PORT of process 0, as every process reaches it",
    "processes": "JAXPAR_PROCESSES is the number of processes that train together",
    "process": "JAXPAR_PROCESS is the index of this process, from 0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The processes of a run, as seen by one of them.

    Attributes:
      coordinator: host:port at which process 0 listens; an IPv6 host is in brackets.
      processes: Number of processes, at least two.
      process: Number of this process, from 0.
      local_process: Number of this process on its machine, from 0, or None if the launcher does not set it.
      devices: Indices of this process's accelerators on its machine, or None for all visible ones.
      source: Launchers whose variables were read; joined with a `+` if several.
      ignored_launchers: Launchers whose variables are also set, but are not read.
    """

    coordinator: str
    processes: int
    process: int
    local_process: int | None = None
    devices: tuple[int, ...] | None = None
    source: str
    ignored_launchers: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """The coordinator's host, without its port and without brackets."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The coordinator's port."""
        return int(self.coordinator.rpartition(":")[2])

    def __str__(self) -> str:
        note = f"; {' and '.join(self.ignored_launchers)} not asked" if self.ignored_launchers else ""
        return f"process {self.process} of {self.processes}, coordinator {self.coordinator} (says {self.source}{note})"


def detect(environment: Mapping[str, str]) -> Cluster | None:
    """Reads the cluster from the environment; returns None if there is only this process.

    Args:
      environment: Environment variables, such as `os.environ`.

    Raises:
      JaxparError: If variables are missing or have impossible values, of which the message lists all; or if only a
        launcher that is not read has started several processes.
    """
    settings = {key: environment[name] for key, name in OWN.items() if environment.get(name)}
    launchers = [name for name, launcher in LAUNCHERS.items() if launcher.started(environment)]
    values: Said = {}
    problems: list[Problem] = []
    # prefers launchers all of whose variables are set: a script may export RANK without torchrun, for another launcher
    candidates = [name for name in launchers if LAUNCHERS[name].is_complete(environment)] or launchers
    # at most one launcher, and none if JAXPAR_* set everything or say that this process is alone: values of two
    # launchers, such as a rank of torchrun and a size of SLURM, do not belong together
    selection = candidates[:1] if len(settings) < len(OWN) and settings.get("processes") != "1" else []
    for name in selection:
        values, problems = LAUNCHERS[name].read(environment, settings)
    for key in ("processes", "process"):
        if key in settings:
            values[key] = read_number(environment, OWN[key], MEANS[key], problems, low=int(key == "processes"))
    if "coordinator" in settings and "coordinator" not in values:
        values["coordinator"] = settings["coordinator"]
    if not settings and not values and not problems:
        if problem := unsupported_launcher(environment):
            raise JaxparError(problem)
        return None
    if values.get("processes") == 1 and not values.get("process") and not problems:
        return None  # one process: there are no others to connect to
    source = " + ".join([*(["JAXPAR"] if settings else []), *selection])
    if not problems and values.get("process", 0) >= values.get("processes", 2**31):
        got = f"process {values['process']} of {values['processes']} (says {source})"
        problems.append(Problem(got, "processes are numbered from 0 to their count - 1", WAY_OUT))
    for key in OWN if not problems else ():
        if values.get(key) is None:
            names = " and ".join(OWN[setting] for setting in settings) or selection[0]
            problems.append(Problem(f"{names} without {OWN[key]}", MEANS[key], WAY_OUT))
    if problems:
        raise JaxparError(*problems)
    return _cluster(values, source=source, unheard=tuple(name for name in launchers if name not in selection))


def _cluster(values: dict[str, Any], *, source: str, unheard: tuple[str, ...]) -> Cluster:
    host, colon, port = values["coordinator"].rpartition(":")
    # no port: a name, an address in brackets, or a plain IPv6 address, whose last colon separates no port
    if not colon or port.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        host, port = values["coordinator"], str(PORT)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 2**16 or set(host) & set(" /@,"):
        got = f"the coordinator {values['coordinator']!r:.80} (says {source})"
        raise refuse(got, rule=MEANS["coordinator"], fix="JAXPAR_COORDINATOR=node01:8476")
    return Cluster(
        coordinator=f"{host}:{port}", processes=values["processes"], process=values["process"],
        local_process=values.get("local"), devices=values.get("devices"), source=source, ignored_launchers=unheard,
    )  # fmt: skip
