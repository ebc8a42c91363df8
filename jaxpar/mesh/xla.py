"""XLA on NVIDIA GPUs: its plugin, and its compiler options for the collectives of several GPUs, each with its reason.

The plugin may be installed without the runtime. This file imports JAX only where it compiles.

Options are chosen by the exposed communication that the timeline models for the jobs under configs/, compiled for
absent GPUs: `python -m tests.bench.collectives` records the effect of each option on each job. Not measured on GPUs.

    XLA's default      the latency hiding scheduler: without it all communication is exposed
    left out           a threshold for all-reduces: no less of them is exposed
                       larger thresholds, as in most recipes: fewer collectives, which start later
                       collective matmul (windowed einsum): more traffic, in chunks whose launches are exposed
                       O1, which pipelines collectives: better with fsdp alone, worse with tensor; more memory, and
                       compiles two to four times as long
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

PLUGIN = "jax_plugins.xla_cuda13"
Preset = Literal["overlapped", "plain"]
_ANOTHER = "xla_dump_emitter_re"  # without effect; a new cache key: JAX reuses a program of equal options
SMALL = 8 * 2**20  # bytes: a gather takes some 30 us over NVLink, several times the launch of a collective


def hush_plugin() -> None:
    """Silences the plugin's warnings that its runtime half is missing, which compiling does not need."""
    _drop(PLUGIN, lambda message: "is not found" in message)
    if find_spec("jax_cuda13_plugin") is None:  # otherwise the warning is a real problem
        _drop("jax._src.xla_bridge", lambda message: PLUGIN in message)


def _drop(logger: str, unwanted: Callable[[str], bool]) -> None:
    log = logging.getLogger(logger)
    if not log.filters:
        log.addFilter(lambda record: not unwanted(record.getMessage()))


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerOption:
    """One option of XLA.

    Attributes:
      name: XLA's name, without dashes.
      value: Its value.
      why: The reason.
    """

    name: str
    value: Any
    why: str


OVERLAPPED = (
    CompilerOption(
        name="xla_gpu_all_gather_combine_threshold_bytes",
        value=SMALL,
        why="a gather of few parameters ends before the first matmul that reads them; a large one is waited for",
    ),
    CompilerOption(
        name="xla_gpu_reduce_scatter_combine_threshold_bytes",
        value=SMALL,
        why="the first gradients travel while the next are computed; combined, they wait for the last of them",
    ),
)


def options(devices: Sequence[Any], preset: Preset, more: Iterable[CompilerOption] = ()) -> dict[str, Any]:
    """Returns the compiler options for these devices, and `more` of a layout; none for one device, CPUs or TPUs."""
    if preset == "plain" or len(devices) < 2 or devices[0].platform in ("cpu", "tpu"):
        return {}
    return {option.name: option.value for option in (*OVERLAPPED, *more)}


def compile_with(lowered: Any, compiler_options: Mapping[str, Any]) -> Any:
    """Compiles a lowered program; drops options that this version of XLA does not have, with a warning."""
    import jax  # not at the top: reading a job imports this module

    options = dict(compiler_options)
    while True:
        try:
            return lowered.compile(compiler_options=options) if options else lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            name = unknown_option(error)
            if name not in options:
                raise
            warnings.warn(dropped_option_warning(name), stacklevel=2)
            del options[name]


def compile_for_lines(lowered: object, program: object, compiler_options: Mapping[str, object]) -> Any:
    """Returns a compiled program whose instructions have the source lines of this lowering.

    A program from JAX's persistent cache has the source lines of its first compilation: of an older file, or of another
    model with the same program. If the cache is on, it is compiled again, under a key of its own.
    """
    import jax  # not at the top: reading a job imports this module

    if not jax.config.values["jax_compilation_cache_dir"]:
        return program
    setting = "jax_compilation_cache_include_metadata_in_key"
    old_value = jax.config.values[setting]
    jax.config.update(setting, True)
    try:
        return compile_with(lowered, {**compiler_options, _ANOTHER: "none"})
    finally:
        jax.config.update(setting, old_value)


def dropped_option_warning(name: str) -> str:
    """Returns the warning that an option is left out."""
    return f"this version of XLA has no option {name}: compiled without it"


def unknown_option(error: Exception) -> str:
    """Returns the name of the option that XLA rejects as unknown, or ""."""
    match = re.search(r"No such compile option: '(\w+)'", str(error))
    return match[1] if match else ""
