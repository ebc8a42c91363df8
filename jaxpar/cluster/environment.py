"""Reads from the environment variables of a launcher which processes train together; connects to nothing.

JAXPAR_*                 jaxpar launch, or by hand    each variable that is set wins
RANK, WORLD_SIZE, ...    torchrun                  ─┐
OMPI_COMM_WORLD_*        mpirun                     ├─► the first launcher that is found sets the rest ─► Cluster
SLURM_*                  srun                       │
JOB_COMPLETION_INDEX     Kubernetes' indexed jobs  ─┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.cluster.launchers import LAUNCHERS, WAY_OUT, Said, number
from jaxpar.errors import JaxparError, Problem, refuse

PORT = 8476  # where only a host is given; JAX uses the same on Kubernetes
OWN = {"coordinator": "JAXPAR_COORDINATOR", "processes": "JAXPAR_PROCESSES", "process": "JAXPAR_PROCESS"}
MEANS = {
    "coordinator": "it is HOST:PORT of process 0, as every process reaches it",
    "processes": "it is how many processes train together, from 1",
    "process": "it is which of the processes this is, from 0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The processes of a run, as one of them sees them.

    Attributes:
      coordinator: host:port at which process 0 listens; an IPv6 host stands in brackets.
      processes: How many there are, at least two.
      process: Which one this is, from 0.
      local: Which one of those on this machine, from 0, or None where the launcher does not say.
      devices: Indices of this process's accelerators on its machine, or None for all that it sees.
      source: Whose variables were read; joined with a `+` where several were.
      unheard: Launchers whose variables are set too, and were not read.
    """

    coordinator: str
    processes: int
    process: int
    local: int | None = None
    devices: tuple[int, ...] | None = None
    source: str
    unheard: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """The coordinator's host, without its port and without brackets."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The coordinator's port."""
        return int(self.coordinator.rpartition(":")[2])

    def __str__(self) -> str:
        other = f"; {' and '.join(self.unheard)} not asked" if self.unheard else ""
        return f"process {self.process} of {self.processes}, coordinator {self.coordinator} (says {self.source}{other})"


def detect(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that the environment describes, or None where this process is alone.

    Args:
      environment: Such as `os.environ`.

    Raises:
      JaxparError: With every variable that is missing, or has an impossible value.
    """
    own = {what: environment[name] for what, name in OWN.items() if environment.get(name)}
    found = [name for name, launcher in LAUNCHERS.items() if launcher.started(environment)]
    said: Said = {}
    problems: list[Problem] = []
    # one whose variables are complete before one of which some are set, as a script exports RANK for another launcher
    asked = [name for name in found if LAUNCHERS[name].is_complete(environment)] or found
    # one launcher at most, and none where JAXPAR_* give everything or say that this process is alone: values of two
    # launchers, such as a rank of torchrun and a size of SLURM, do not belong together
    heard = asked[:1] if len(own) < len(OWN) and own.get("processes") != "1" else []
    for name in heard:
        said, problems = LAUNCHERS[name].read(environment, own)
    for what in ("processes", "process"):
        if what in own:
            said[what] = number(environment, OWN[what], MEANS[what], problems, low=int(what == "processes"))
    if "coordinator" in own and "coordinator" not in said:
        said["coordinator"] = own["coordinator"]
    if not own and not said and not problems:
        return None
    if said.get("processes") == 1 and not said.get("process") and not problems:
        return None  # alone, so there is nobody to find
    source = " + ".join([*(["JAXPAR"] if own else []), *heard])
    if not problems and said.get("process", 0) >= said.get("processes", 2**31):
        got = f"process {said['process']} of {said['processes']} (says {source})"
        problems.append(Problem(got, "processes are numbered from 0, below how many there are", WAY_OUT))
    for what in OWN if not problems else ():
        if said.get(what) is None:
            rest = " and ".join(OWN[other] for other in own) or heard[0]
            problems.append(Problem(f"{rest} without {OWN[what]}", MEANS[what], WAY_OUT))
    if problems:
        raise JaxparError(*problems)
    return _cluster(said, source=source, unheard=tuple(name for name in found if name not in heard))


def _cluster(said: dict[str, Any], *, source: str, unheard: tuple[str, ...]) -> Cluster:
    """Returns the cluster, its coordinator as host:port."""
    host, colon, port = said["coordinator"].rpartition(":")
    # no port: a name, an address in brackets, or a bare IPv6 address, whose last colon separates no port
    if not colon or port.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        host, port = said["coordinator"], str(PORT)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 2**16 or set(host) & set(" /@,"):
        got = f"the coordinator {said['coordinator']!r:.80} (says {source})"
        raise refuse(got, rule=MEANS["coordinator"], fix="JAXPAR_COORDINATOR=node01:8476")
    return Cluster(
        coordinator=f"{host}:{port}", processes=said["processes"], process=said["process"],
        local=said.get("local"), devices=said.get("devices"), source=source, unheard=unheard,
    )  # fmt: skip
