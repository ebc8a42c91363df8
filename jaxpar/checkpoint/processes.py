"""Decisions of several processes that write and read one checkpoint: the first looks at the files and tells the others.

All of these must be called by all processes at the same point. With one process nothing is sent.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # JAX has no public name for the texts that its coordinator keeps
from jax.experimental import multihost_utils

_ROOM = 4096  # bytes of lines that a process can tell
_FAILED = "failed: "  # in place of a text
_FOREVER = 2**31 - 1  # milliseconds; a process that is gone is noticed by the watchdog, which ends this one


def is_first() -> bool:
    """Returns whether this process is the one that hashes, renames and deletes."""
    return jax.process_index() == 0


def several() -> bool:
    """Returns whether there is more than one process."""
    return jax.process_count() > 1


def from_first(value: int) -> int:
    """Returns the value of the first process, on all of them; they wait for each other here."""
    if not several():
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def meet(name: str, seconds: float) -> bool:
    """Returns whether all processes call this with the same name within a time, such as after an error of each.

    It goes through JAX's coordinator, so that a process that never calls it does not keep this one for ever.
    """
    if not several():
        return True
    coordinator: Any = distributed.global_state.client
    try:
        coordinator.wait_at_barrier(name, int(1000 * seconds))
    except jax.errors.JaxRuntimeError:  # the time is over, or another process is gone
        return False
    return True


def gathered(lines: list[str]) -> list[str]:
    """Returns the lines of all processes, without repetition, on all of them; they wait for each other here."""
    if not several():
        return lines
    mine = np.zeros(_ROOM, np.uint8)
    text = "\n".join(lines).encode()[:_ROOM]
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    everyone = multihost_utils.process_allgather(mine)
    said = (bytes(row).rstrip(b"\0").decode(errors="replace").splitlines() for row in everyone)
    return list(dict.fromkeys(line for lines in said for line in lines))


def told_to_first(name: str, make: Callable[[], str]) -> list[str]:
    """Returns the texts of all processes to the first, which waits for them, and none to the others.

    It may be called in a thread while the devices compute: texts go through JAX's coordinator, not through devices.

    Args:
      name: Of this occasion, the same on all processes, and only once.
      make: Returns the text of this process.

    Raises:
      OSError: If `make` raises it; and on the first process if that of another does.
    """
    if not several():
        return [make()]
    coordinator: Any = distributed.global_state.client
    own = f"{name}/{jax.process_index()}"
    try:
        coordinator.key_value_set(own, make())
    except OSError as error:
        coordinator.key_value_set(own, f"{_FAILED}{error.errno or 0} {error.strerror}")
        raise
    if not is_first():
        return []
    texts = [coordinator.blocking_key_value_get(f"{name}/{each}", _FOREVER) for each in range(jax.process_count())]
    coordinator.key_value_delete(f"{name}/")
    for process, text in enumerate(texts):
        if text.startswith(_FAILED):
            code, _, said = text.removeprefix(_FAILED).partition(" ")
            raise OSError(int(code), f"process {process}: {said}")
    return texts
