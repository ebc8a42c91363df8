"""Compiles a program for inspection: its text, its buffers, and XLA's log of the compilation.

Buffers and their lifetimes come from files that XLA dumps on request, because the objects that JAX returns have only
total sizes. The same program is compiled only once if JAX has a compilation cache (`JAX_COMPILATION_CACHE_DIR`):

    StableHLO, devices, options, versions ──SHA-256──► FOLDER/inspected/KEY ──► fields of a `Compiled`

JAX's own cache entries cannot be used: they are executables, which contain neither buffers nor their lifetimes.
"""

import hashlib
import json
import os
import platform
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.stages import Lowered

from jaxpar.errors import refuse
from jaxpar.files import partial_path
from jaxpar.mesh.absent_gpus import find_target_config, make_toolkit
from jaxpar.mesh.xla import dropped_option_warning, unknown_option

CACHE_FORM = 2  # version of an entry: increment it whenever the fields or their meaning change
_COMPILERS = ("jax", "jaxlib", "jax-cuda13-pjrt", "jax-cuda13-plugin")
_CACHE_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache")  # settings that do not affect programs
_DIGEST = hashlib.sha256().digest_size
_NOISE = (
    "cuda_plugin_extension is not found",
    "All log messages before absl::InitializeLog",
    "exceeds the base limit",  # the program does not fit: the report says so
    "by rematerialization; only reduced",
)
_TUNING = "xla_gpu_autotune_level"
_COLLECTIVES = "xla_gpu_experimental_use_collective_kernels"
_COSTS = "xla_gpu_collect_cost_model_stats"
_LINKER = "xla_gpu_libnvjitlink_mode"
_NEEDS = {  # XLA's message if it cannot support an option
    "Failed to get configs": _TUNING,  # some products have no kernel that is usable without autotuning
    "No supported config found": _TUNING,  # the same in XLA 0.11
    "Cannot find key: sm_": _COSTS,  # the cost model has no table for this GPU
}
REMATERIALIZED = "Involuntary full rematerialization"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program as XLA compiled it.

    Attributes:
      text: The optimized module.
      assignment: The buffer assignment, as text.
      lifetimes: The live ranges of buffers, as text; empty if this backend writes none.
      arguments: Bytes of arguments per device, as XLA counts them.
      outputs: Bytes of outputs.
      aliased: Bytes of outputs that reuse an argument's memory.
      temporary: Bytes of temporary memory.
      host: Bytes of temporary memory on the host.
      platform: `cpu` or `gpu`.
      seconds: Compilation time.
      said: Lines of XLA's log about resharding.
      warned: All other lines of the log.
    """

    text: str = field(repr=False)
    assignment: str = field(repr=False)
    lifetimes: str = field(repr=False)
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    host: int
    platform: str
    seconds: float
    said: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()


def compile_program(
    lowered: Lowered,
    devices: Sequence[Any],
    *,
    use_cache: bool = False,
    compiler_options: Mapping[str, Any] = MappingProxyType({}),
) -> Compiled:
    """Compiles a lowered program; prints XLA's other log lines to stderr.

    Args:
      lowered: Result of `jax.jit(...).lower`.
      devices: Devices to compile for, in the order of the mesh.
      use_cache: Read the program from an earlier inspection, and store it for later ones.
      compiler_options: XLA options that are also used when the program is compiled to be run.

    Raises:
      JaxparError: With XLA's first line, if it does not compile.
    """
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    options = {**compiler_options, **_options(platform)}
    file = cache_file(lowered, devices, options) if use_cache else None
    cached = read_cached(file) if file else None
    if cached:
        cached |= {name: tuple(cached[name]) for name in ("said", "warned")}
        result = Compiled(**cached)
    else:
        result = _compile_and_read(lowered, platform, options)
        if file:
            write_cached(file, asdict(result))
    if result.warned:
        print("\n".join(result.warned), file=sys.stderr)
    return result


def _options(platform: str) -> dict[str, Any]:
    if platform == "cpu":
        return {}
    options: dict[str, Any] = {_COSTS: True}
    if jax.default_backend() != "gpu":
        options[_TUNING] = 0  # there is no GPU to try kernels on, and trying them all takes long
        # XLA 0.12 treats absent nodes as one NVLink domain, writes its own kernels for small all-reduces between
        # nodes, and with 64 devices this ends the process
        options[_COLLECTIVES] = ""
        # XLA prefers libnvJitLink, which torch and jax[cuda13] install, to the stand-in for `ptxas`; it really links,
        # and does not find a kernel's callees in the stand-in for libdevice
        options[_LINKER] = "LIB_NV_JIT_LINK_MODE_DISABLED"
    return options


def _compile_and_read(lowered: Lowered, platform: str, options: dict[str, Any]) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="jaxpar-") as folder:
        dumps: dict[str, Any] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_emitter_re": f"none of {folder}",  # a new cache key each time: JAX's cache returns no buffers
        }
        if platform == "gpu" and jax.default_backend() != "gpu":
            dumps["xla_gpu_cuda_data_dir"] = str(make_toolkit(Path(folder)))
        begin = time.perf_counter()
        try:
            with _without_cache():
                program, lines = _compile(lowered, dumps | options)
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            raise refuse(
                f"XLA does not compile it for {platform}: {str(error).strip().splitlines()[0][:300]}",
                rule="the step must compile for the target before it can be inspected",
                fix="pip install nvidia-cudnn-cu13" if "cudnn" in str(error).lower() else "change what XLA names",
            ) from error
        seconds = time.perf_counter() - begin
        stats = program.memory_analysis()
        return Compiled(
            text=program.as_text(),
            assignment=_read(folder, "*after_optimizations-buffer-assignment.txt"),
            lifetimes=_read(folder, "*after_optimizations-live-range.txt"),
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporary=stats.temp_size_in_bytes,
            host=stats.host_temp_size_in_bytes,
            platform=platform,
            seconds=seconds,
            said=tuple(line for line in lines if REMATERIALIZED in line),
            warned=tuple(line for line in lines if REMATERIALIZED not in line),
        )


def _compile(lowered: Lowered, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """Compiles; if XLA cannot support a helpful option, compiles again without it.

    Returns:
      The program, and XLA's log without irrelevant lines.
    """
    missing: list[str] = []
    while True:
        with _capture_stderr() as log:
            try:
                program = lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                unmet = [o for words, o in _NEEDS.items() if words in str(error) and o in options]
                if (unknown := unknown_option(error)) in options:
                    unmet.append(unknown)
                    missing += [dropped_option_warning(unknown)] * (
                        unknown not in (_COLLECTIVES, _LINKER)
                    )  # older versions need neither
                if not unmet:
                    raise
                options = {name: value for name, value in options.items() if name not in unmet}
                continue
        return program, missing + [line for line in log if line.strip() and not any(noise in line for noise in _NOISE)]


def _read(folder: str, pattern: str) -> str:
    files = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else ""


@contextmanager
def _without_cache() -> Iterator[None]:
    """Keeps programs that are compiled for inspection out of the persistent cache."""
    previous = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", previous)


@contextmanager
def _capture_stderr() -> Iterator[list[str]]:
    """Collects the text that XLA writes to the standard error of the process."""
    lines: list[str] = []
    sys.stderr.flush()
    stderr_fd = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(stderr_fd, 2)
            os.close(stderr_fd)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def cache_file(lowered: Lowered, devices: Sequence[Any], options: dict[str, Any]) -> Path | None:
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
        "form": CACHE_FORM,
        "program": lowered.as_text(debug_info=True),  # with the source lines that findings show
        "devices": [(device.id, device.process_index, device.device_kind) for device in devices],
        # all that XLA knows of an absent chip (memory, links); a real chip is identified by its machine
        "described": find_target_config(devices[0]) or platform.node(),
        "options": options,
        "flags": os.environ.get("XLA_FLAGS"),
        "settings": {name: repr(v) for name, v in jax.config.values.items() if not name.startswith(_CACHE_SETTINGS)},
        "versions": {name: _version(name) for name in _COMPILERS},
    }
    return Path(folder) / "inspected" / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def read_cached(file: Path) -> dict[str, Any] | None:
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


def write_cached(file: Path, fields: Mapping[str, object]) -> None:
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
