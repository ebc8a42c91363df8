"""Decisions of several processes that write and read one checkpoint: the first looks at the files and tells the others.

`from_first` must be called by all processes at the same point. With one process nothing is sent.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


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
