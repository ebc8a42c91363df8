"""Caches compiled programs on disk, so that the same program is compiled for inspection only once.

    StableHLO, devices, options, versions ──SHA-256──► FOLDER/inspected/KEY ──► fields of a `Compiled`

`FOLDER` is that of JAX's own compilation cache (`JAX_COMPILATION_CACHE_DIR`); without it, nothing is stored.
JAX's own cache entries cannot be used: they are executables, which contain neither buffers nor their lifetimes.
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
from jax.stages import Lowered

from jaxpar.files import partial_path
from jaxpar.mesh.absent_gpus import target_config_of

FORM = 2  # version of an entry: increment it whenever the fields or their meaning change
_COMPILERS = ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin")
_OF_CACHES = ("jax_compilation_cache", "jax_persistent_cache")  # settings that do not affect programs
_DIGEST = hashlib.sha256().digest_size


def file_of(lowered: Lowered, devices: Sequence[Any], options: dict[str, Any]) -> Path | None:
    """The cache file of a program, existing or not; None if JAX has no cache folder on this machine.

    Args:
      lowered: Result of `jax.jit(...).lower`, for a `jit` without compiler options, which its text does not show.
      devices: Devices to compile for, in the order of the mesh.
      options: Compiler options.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    key = {
        "form": FORM,
        "program": lowered.as_text(debug_info=True),  # with the source lines that findings show
        "devices": [(device.id, device.process_index, device.device_kind) for device in devices],
        # all that XLA knows of an absent chip (memory, links); a real chip is identified by its machine
        "described": target_config_of(devices[0]) or platform.node(),
        "options": options,
        "flags": os.environ.get("XLA_FLAGS"),
        "settings": {name: repr(v) for name, v in jax.config.values.items() if not name.startswith(_OF_CACHES)},
        "versions": {name: _version(name) for name in _COMPILERS},
    }
    return Path(folder) / "inspected" / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def read(file: Path) -> dict[str, Any] | None:
    """Reads the fields of a file; None if there is none or, with a warning, if it is damaged."""
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
    """Writes a file atomically; if it cannot, it only warns, because the program is in memory."""
    body = zlib.compress(json.dumps(fields).encode(), level=1)
    part = partial_path(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(body).digest() + body)
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        warnings.warn(f"{file}: {error.strerror}; the program is not cached", stacklevel=3)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
