"""Writes checkpoints asynchronously and atomically, and verifies every byte when it loads them.

    RUN/checkpoints/000200.writing/   each process writes its file of arrays/; the MANIFEST comes last
    RUN/checkpoints/000200/           complete: MANIFEST lists every block of every array with its hash
    RUN/checkpoints/000200.damaged/   set aside: a block has another hash
    RUN/checkpoints/000200.left/      set aside: training went back to an earlier checkpoint

A run uses `store`; `writing` and `reading` handle one checkpoint, `array_files` its files, `manifest` its MANIFEST;
`saved_replicas` restores under another number of replicas, and `listing` says which checkpoints there are and stay.
Names are imported on first use: listing and verifying checkpoints takes no jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpar.checkpoint.spec import Checkpoints
    from jaxpar.checkpoint.store import Store

__all__ = ["Checkpoints", "Store"]

_HOMES = {"Checkpoints": "spec", "Store": "store"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
