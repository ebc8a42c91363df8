"""The memory pool of a GPU: the share that JAX preallocates, and that every prediction assumes.

    memory that the driver reports   79.11 GiB on an H100
    x SHARE                          71.2 GiB: the pool that JAX allocates when it creates its devices
    - WORKSPACE                      70.7 GiB: for a program's arrays, as the compiler counts them

The memory outside the pool is for allocations outside of JAX: the driver's context, NCCL's buffers, CUDA graphs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.errors import refuse

# NVIDIA's recipes have 0.9 ("we typically set it to 0.9 or 0.8": docs.nvidia.com/jax-toolbox, GPU performance)
SHARE = 0.9
WORKSPACE = 2**29  # bytes of the pool for cuBLAS's and cuDNN's workspaces, which the compiler does not count: assumed
NAME, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE, OFF = "XLA_PYTHON_CLIENT_PREALLOCATE", ("false", "False", "0")
OWN = 0.75  # JAX's default share; without preallocation, its limit
_LEAST = 0.9  # least share of the pool for arrays, else workspaces would fill a small pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The pool of GPU memory that JAX allocates when it creates its devices.

    Attributes:
      share: Share of the memory, above 0, at most 1.
      why: Source of the share, in words.
    """

    share: float = SHARE
    why: str = ""

    def program_bytes(self, memory: int) -> int:
        """Returns the bytes for a program's arrays; `memory` is the size that the driver reports."""
        pool = memory * self.share
        return int(max(pool - WORKSPACE, pool * _LEAST))

    def memory_for(self, room: int) -> float:
        """Returns the memory size at which a program has this number of bytes: the inverse of `program_bytes`."""
        return min(room + WORKSPACE, room / _LEAST) / self.share

    def __str__(self) -> str:
        share = f"a run takes {self.share:.3g} of it" + f" ({self.why})" * bool(self.why)
        return f"{share}, 512 MiB of that for workspaces of cuBLAS and cuDNN; the rest is the driver's and NCCL's"


def pool_of_environment(environment: Mapping[str, str]) -> Pool:
    """Returns the pool of a run with these environment variables: the share that they set, or jaxpar's `SHARE`.

    Raises:
      JaxparError: If the share is no number in range, or two variables set it.
    """
    fractions = {name: environment[name] for name in (NAME, OLD) if environment.get(name)}
    if len(fractions) == 2:
        raise refuse(
            f"{NAME} and {OLD}",
            rule="only one of the two variables is set; JAX has deprecated the second",
            fix=f"unset {OLD}",
        )
    for name, text in fractions.items():
        part = _part(text)
        if part is None:
            raise refuse(f"{name}={text!r:.60}", rule="a number above 0, at most 1", fix=f"{name}=0.9, or unset it")
        return Pool() if part == SHARE else Pool(share=part, why=f"{name}={text}")
    if environment.get(PREALLOCATE) in OFF:
        return Pool(share=OWN, why=f"JAX's own, with {PREALLOCATE}={environment[PREALLOCATE]}")
    return Pool()


def pool_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set before JAX creates its devices; none if the user has set the memory pool."""
    set_by_user = any(environment.get(name) for name in (NAME, OLD)) or environment.get(PREALLOCATE) in OFF
    return {} if set_by_user else {NAME: f"{SHARE}"}


def _part(text: str) -> float | None:
    try:
        part = float(text)
    except ValueError:
        return None
    return part if 0 < part <= 1 else None
