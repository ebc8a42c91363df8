"""Compiles a program for inspection: its text, its buffers, and XLA's log of the compilation.

The buffers and their lifetimes are in the files that XLA writes on request; the objects that
JAX returns have only their sums.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.inspector import program_cache
from jaxpar.mesh.preset import unknown_option, without
from jaxpar.mesh.stand_in_toolkit import make_toolkit

_NOISE = (
    "cuda_plugin_extension is not found",
    "All log messages before absl::InitializeLog",
    "exceeds the base limit",  # it does not fit: the report says so
    "by rematerialization; only reduced",
)
_TUNING = "xla_gpu_autotune_level"
_COLLECTIVES = "xla_gpu_experimental_use_collective_kernels"
_COSTS = "xla_gpu_collect_cost_model_stats"
_LINKER = "xla_gpu_libnvjitlink_mode"
_NEEDS = {  # what XLA says where an option needs what it has not
    "Failed to get configs": _TUNING,  # some products have no kernel that is taken without a choice
    "No supported config found": _TUNING,  # so XLA 0.11 says it
    "Cannot find key: sm_": _COSTS,  # its cost model has no table for this GPU
}
REMATERIALIZED = "Involuntary full rematerialization"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program as XLA compiled it.

    Attributes:
      text: The optimized module.
      assignment: The buffer assignment, as text.
      lifetimes: The live ranges of buffers, as text; empty where this backend writes none.
      arguments: Bytes of arguments per device, as XLA counts them.
      outputs: Bytes of outputs.
      aliased: Bytes of outputs that take over an argument's memory.
      temporary: Bytes of temporary memory.
      host: Bytes of temporary memory on the host.
      platform: `cpu` or `gpu`.
      seconds: That compiling took.
      said: Lines of XLA's log about resharding.
      warned: Its other lines.
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
    lowered: Any, devices: Sequence[Any], *, keep: bool = False, told: Mapping[str, Any] = MappingProxyType({})
) -> Compiled:
    """Compiles a lowered program, and returns what XLA made of it; its other words go to the standard error.

    Args:
      lowered: As `jax.jit(...).lower` returns it.
      devices: What it is compiled for, in the order of the mesh.
      keep: Read it where an earlier inspection kept it, and keep it for later ones; see `program_cache`.
      told: What XLA is told where it compiles the program to be run.

    Raises:
      JaxparError: With XLA's first line, if it does not compile.
    """
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    options = {**told, **_options(platform)}
    file = program_cache.file_of(lowered, devices, options) if keep else None
    kept = program_cache.read(file) if file else None
    if kept:
        kept |= {name: tuple(kept[name]) for name in ("said", "warned")}
        found = Compiled(**kept)
    else:
        found = _compiled(lowered, platform, options)
        if file:
            program_cache.write(file, asdict(found))
    if found.warned:
        print("\n".join(found.warned), file=sys.stderr)
    return found


def _options(platform: str) -> dict[str, Any]:
    """Returns what XLA is told for the sake of an inspection."""
    if platform == "cpu":
        return {}
    options: dict[str, Any] = {_COSTS: True}
    if jax.default_backend() != "gpu":
        options[_TUNING] = 0  # there is no GPU to try kernels on, and going through them takes long
        # taking absent nodes for one NVLink domain, XLA 0.12 writes kernels of its own for small all-reduces
        # between nodes, and with 64 devices ends the process while it does
        options[_COLLECTIVES] = ""
        # XLA prefers libnvJitLink, which torch and jax[cuda13] install, to the stand-in for `ptxas`; it links for real,
        # and does not find in the stand-in for libdevice what a kernel calls
        options[_LINKER] = "LIB_NV_JIT_LINK_MODE_DISABLED"
    return options


def _compiled(lowered: Any, platform: str, options: dict[str, Any]) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="jaxpar-") as folder:
        dumps: dict[str, Any] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_emitter_re": f"none of {folder}",  # another key each time: from JAX's cache come no buffers
        }
        if platform == "gpu" and jax.default_backend() != "gpu":
            dumps["xla_gpu_cuda_data_dir"] = str(make_toolkit(Path(folder)))
        begin = time.perf_counter()
        try:
            with _uncached():
                program, lines = _compile(lowered, dumps | options)
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            raise refuse(
                f"XLA does not compile it for {platform}: {str(error).strip().splitlines()[0][:300]}",
                rule="the step must compile for the target before it can be inspected",
                fix="pip install nvidia-cudnn-cu13" if "cudnn" in str(error).lower() else "what XLA names",
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


def _compile(lowered: Any, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """Compiles, and again without an option that only helps, where XLA has not what the option needs.

    Returns:
      The program, and what XLA said meanwhile, without noise.
    """
    missing: list[str] = []
    while True:
        with _listening() as said:
            try:
                program = lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                unmet = [o for words, o in _NEEDS.items() if words in str(error) and o in options]
                if (unknown := unknown_option(error)) in options:
                    unmet.append(unknown)
                    missing += [without(unknown)] * (
                        unknown not in (_COLLECTIVES, _LINKER)
                    )  # older versions need neither
                if not unmet:
                    raise
                options = {name: value for name, value in options.items() if name not in unmet}
                continue
        return program, missing + [line for line in said if line.strip() and not any(noise in line for noise in _NOISE)]


def _read(folder: str, pattern: str) -> str:
    found = sorted(Path(folder).glob(pattern), key=lambda path: path.stat().st_size)
    return found[-1].read_text() if found else ""


@contextmanager
def _uncached() -> Iterator[None]:
    """Keeps programs that are compiled for inspection out of the persistent cache."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collects the text that XLA writes to the standard error of the process."""
    said: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said += file.read().decode(errors="replace").splitlines()
