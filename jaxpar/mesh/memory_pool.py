"""The memory pool of a GPU: the share that JAX preallocates, and that every prediction counts on.

    memory that the driver reports   79.11 GiB on an H100
    x SHARE                          71.2 GiB: the pool that JAX takes when it makes its devices
    - WORKSPACE                      70.7 GiB: for a program's arrays, as the compiler counts them

The memory beside the pool is for allocations outside of JAX: the driver's context, NCCL's buffers, CUDA graphs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.errors import refuse

# NVIDIA's recipes have 0.9 ("we typically set it to 0.9 or 0.8": docs.nvidia.com/jax-toolbox, GPU performance)
SHARE = 0.9
WORKSPACE = 2**29  # bytes of the pool for cuBLAS's and cuDNN's workspaces, which no compiler counts: assumed
NAME, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE, OFF = "XLA_PYTHON_CLIENT_PREALLOCATE", ("false", "False", "0")
OWN = 0.75  # what JAX takes where nobody says how much; without preallocation, what it grows to
_LEAST = 0.9  # of a pool so small that the workspaces would fill it


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The pool that JAX takes of a GPU's memory when it makes its devices.

    Attributes:
      part: Above 0, at most 1.
      why: Who says so, in words.
    """

    part: float = SHARE
    why: str = ""

    def room(self, memory: int) -> int:
        """Returns the bytes for a program's arrays, of so many that the driver reports."""
        pool = memory * self.part
        return int(max(pool - WORKSPACE, pool * _LEAST))

    def memory(self, room: int) -> float:
        """Returns the bytes that the driver reports where so many are for a program: `room`, turned round."""
        return min(room + WORKSPACE, room / _LEAST) / self.part

    def __str__(self) -> str:
        who = f"a run takes {self.part:.3g} of it" + f" ({self.why})" * bool(self.why)
        return f"{who}, 512 MiB of that for workspaces of cuBLAS and cuDNN; the rest is the driver's and NCCL's"


def taken(environment: Mapping[str, str]) -> Pool:
    """Returns the pool that a run takes with these variables: the share that they set, or jaxpar's own `SHARE`.

    Raises:
      JaxparError: If they say no share, or two.
    """
    said = {name: environment[name] for name in (NAME, OLD) if environment.get(name)}
    if len(said) == 2:
        raise refuse(
            f"{NAME} and {OLD}",
            rule="only one of the two variables is set; JAX has deprecated the second",
            fix=f"unset {OLD}",
        )
    for name, text in said.items():
        part = _part(text)
        if part is None:
            raise refuse(f"{name}={text!r:.60}", rule="a number above 0, at most 1", fix=f"{name}=0.9, or unset it")
        return Pool() if part == SHARE else Pool(part=part, why=f"{name}={text}")
    if environment.get(PREALLOCATE) in OFF:
        return Pool(part=OWN, why=f"JAX's own, with {PREALLOCATE}={environment[PREALLOCATE]}")
    return Pool()


def wanted(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set before JAX makes its devices: none where the user's own say how memory is taken."""
    said = any(environment.get(name) for name in (NAME, OLD)) or environment.get(PREALLOCATE) in OFF
    return {} if said else {NAME: f"{SHARE}"}


def _part(text: str) -> float | None:
    try:
        part = float(text)
    except ValueError:
        return None
    return part if 0 < part <= 1 else None
