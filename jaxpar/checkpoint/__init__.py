"""Checkpoints: written while training goes on, atomic, and checked byte by byte before they are loaded.

    RUN/checkpoints/000200.writing/   each process writes a file of arrays/, until the MANIFEST is there
    RUN/checkpoints/000200/           complete: MANIFEST lists every block of every array with its hash
    RUN/checkpoints/000200.damaged/   a block has another hash: set aside
    RUN/checkpoints/000200.left/      training went back to an earlier one: set aside

`store` is what a run uses, `writing` and `reading` handle one checkpoint, `arrays` its files, `manifest` its list;
`replicas` goes on with another number of them.
Names are resolved when they are first used: to list or verify checkpoints takes no jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpar.checkpoint.spec import Checkpoints
    from jaxpar.checkpoint.store import Store
    from jaxpar.files import make_folder, write_json, write_text

__all__ = ["Checkpoints", "Store", "make_folder", "write_json", "write_text"]

_HOMES = {"Checkpoints": "spec", "Store": "store"} | dict.fromkeys(("make_folder", "write_json", "write_text"), "files")


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
