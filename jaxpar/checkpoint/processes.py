"""Coordinates the processes that write and read a checkpoint: the first inspects the files and informs the others.

All processes must call each of these functions at the same point. A single process sends nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # JAX has no public name for the key-value store of its coordinator
from jax.experimental import multihost_utils

_ROOM = 4096  # bytes of lines that a process can send
_FAILED = "failed: "  # prefix of an error that is sent in place of a text
_FOREVER = 2**31 - 1  # milliseconds; if a process is gone, the watchdog notices and ends this one


def is_first() -> bool:
    """Whether this process is the one that inspects, renames and deletes."""
    return jax.process_index() == 0


def is_multiprocess() -> bool:
    """Whether there is more than one process."""
    return jax.process_count() > 1


def broadcast(value: int) -> int:
    """Broadcasts the value of the first process to all; a barrier."""
    if not is_multiprocess():
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def barrier(name: str, seconds: float) -> bool:
    """Waits for all processes to call this with the same name, such as after an error; False if the time runs out.

    It uses JAX's coordinator, so that a process that never calls it does not block this one for ever.
    """
    if not is_multiprocess():
        return True
    coordinator: Any = distributed.global_state.client
    try:
        coordinator.wait_at_barrier(name, int(1000 * seconds))
    except jax.errors.JaxRuntimeError:  # the time is over, or another process is gone
        return False
    return True


def gather_lines(lines: list[str]) -> list[str]:
    """Gathers the lines of all processes, without duplicates, on all of them; a barrier."""
    if not is_multiprocess():
        return lines
    buffer = np.zeros(_ROOM, np.uint8)
    text = "\n".join(lines).encode()[:_ROOM]
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    buffers = multihost_utils.process_allgather(buffer)
    texts = (bytes(row).rstrip(b"\0").decode(errors="replace").splitlines() for row in buffers)
    return list(dict.fromkeys(line for lines in texts for line in lines))


def gather_to_first(name: str, make: Callable[[], str]) -> list[str]:
    """Gathers the texts of all processes on the first process, which waits for them; returns [] on the others.

    It may be called in a thread while the devices compute: texts go through JAX's coordinator, not through devices.

    Args:
      name: Key of this call, the same on all processes and used once.
      make: Returns the text of this process.

    Raises:
      OSError: If `make` raises it; on the first process also if `make` of another process raises it.
    """
    if not is_multiprocess():
        return [make()]
    coordinator: Any = distributed.global_state.client
    key = f"{name}/{jax.process_index()}"
    try:
        coordinator.key_value_set(key, make())
    except OSError as error:
        coordinator.key_value_set(key, f"{_FAILED}{error.errno or 0} {error.strerror}")
        raise
    if not is_first():
        return []
    texts = [coordinator.blocking_key_value_get(f"{name}/{rank}", _FOREVER) for rank in range(jax.process_count())]
    coordinator.key_value_delete(f"{name}/")
    for process, text in enumerate(texts):
        if text.startswith(_FAILED):
            code, _, message = text.removeprefix(_FAILED).partition(" ")
            raise OSError(int(code), f"process {process}: {message}")
    return texts
