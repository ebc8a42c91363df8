"""By how much a process grows with each save; as a program, its resident memory over many saves of a small state."""

import gc
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpar.checkpoint import Checkpoints, Store

ARRAYS = 12


def of_saves(folder, saves, *, first, measured):
    """Returns by how much what is measured grows per save, once `first` of them have made what is kept for long."""
    state = {f"array{index}": jnp.arange(16.0) + index for index in range(ARRAYS)}
    store, seen = Store(folder, Checkpoints(keep_last=1)), []
    for step in range(1, first + saves + 1):
        store.save(step, state, {})
        if step in (first, first + saves):
            store.wait()
            gc.collect()
            seen.append(measured())
    return (seen[1] - seen[0]) / saves


def resident():
    """Returns the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(of_saves(Path(sys.argv[1]), int(sys.argv[2]), first=200, measured=resident))
