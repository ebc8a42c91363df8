"""Checkpoints: written beside the training, whole or not there, checked before they are believed.

    RUN/checkpoints/000200.writing/   what Orbax writes, until its MANIFEST is in it
    RUN/checkpoints/000200/           a whole one: every byte is as MANIFEST says, or it is damaged
    RUN/checkpoints/000200.damaged/   one that was not, set aside
    RUN/checkpoints/000200.left/      one that training went back behind

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
