"""Compiled programs on disk: the same program is compiled for inspection once, and read from then on.

    StableHLO, devices, options, versions ──SHA-256──► FOLDER/inspected/KEY ──► fields of a `Compiled`

`FOLDER` is that of JAX's own compilation cache (`JAX_COMPILATION_CACHE_DIR`); where JAX has none, nothing is kept.
JAX's entries are executables: the buffers and their lifetimes are not in them.
"""

import hashlib
import json
import os
import platform
import warnings
import zlib
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jaxpar.files import partial_path
from jaxpar.mesh.absent import description_of

FORM = 2  # of an entry: one more whenever the fields or their meaning change
_COMPILERS = ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin")
_OF_CACHES = ("jax_compilation_cache", "jax_persistent_cache")  # settings that change no program
_DIGEST = hashlib.sha256().digest_size


def file_of(lowered: Any, devices: Sequence[Any], options: dict[str, Any]) -> Path | None:
    """Returns the file of a program, whether it is there or not; None where JAX has no folder on this machine.

    Args:
      lowered: As `jax.jit(...).lower` returns it, from a `jit` without compiler options: its text does not say them.
      devices: What it is compiled for, in the order of the mesh.
      options: What XLA is told besides.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    said = {
        "form": FORM,
        "program": lowered.as_text(debug_info=True),  # with the lines of source that findings name
        "devices": [(device.id, device.process_index, device.device_kind) for device in devices],
        # memory, links: all that XLA knows of an absent chip; what is there is as its machine has it
        "described": description_of(devices[0]) or platform.node(),
        "options": options,
        "flags": os.environ.get("XLA_FLAGS"),
        "settings": {name: repr(v) for name, v in jax.config.values.items() if not name.startswith(_OF_CACHES)},
        "versions": {name: _version(name) for name in _COMPILERS},
    }
    return Path(folder) / "inspected" / hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def read(file: Path) -> dict[str, Any] | None:
    """Returns the fields that a file holds; None where there is no such file, or, with a warning, a damaged one."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"{file}: {error.strerror}; the program is compiled again", stacklevel=3)
        return None
    if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
        warnings.warn(f"{file} is damaged; the program is compiled again", stacklevel=3)
        return None
    return json.loads(zlib.decompress(data[_DIGEST:]))


def write(file: Path, fields: dict[str, Any]) -> None:
    """Writes a file so that a reader sees all of it or none; where it cannot, warns: the program is in hand."""
    body = zlib.compress(json.dumps(fields).encode(), level=1)
    part = partial_path(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(body).digest() + body)
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        warnings.warn(f"{file}: {error.strerror}; the program is not kept", stacklevel=3)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
