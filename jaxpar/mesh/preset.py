"""What XLA is told about the collectives of several GPUs: each option with its reason.

Chosen by the exposed communication that the timeline models for jobs under configs/, as compiled for their absent GPUs:
`python -m tests.bench.collectives`, whose record says what each option does to each job. No GPU has measured it.

    kept as they are   the latency hiding scheduler, which XLA has on: without it all communication is exposed
    left out           a threshold for all-reduces: as much of them is exposed with it
                       larger thresholds, as most recipes have them: fewer collectives, which begin later
                       collective matmul (windowed einsum): more to send, in pieces whose launches are exposed
                       O1, which pipelines collectives: better with fsdp alone, worse beside tensor; more memory, and
                       twice to four times as long to compile
"""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Preset = Literal["overlapped", "plain"]
_ANOTHER = "xla_dump_emitter_re"  # an option that changes nothing: under the same ones JAX returns what it has compiled
SMALL = 8 * 2**20  # bytes: of gathers over NVLink some 30 us, several times what one more collective costs to start


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of XLA.

    Attributes:
      name: As XLA has it, without dashes.
      value: What it is set to.
      why: The reason.
    """

    name: str
    value: Any
    why: str


OVERLAPPED = (
    Option(
        name="xla_gpu_all_gather_combine_threshold_bytes",
        value=SMALL,
        why="a gather of few parameters ends before the first matmul that reads them; a large one is waited for",
    ),
    Option(
        name="xla_gpu_reduce_scatter_combine_threshold_bytes",
        value=SMALL,
        why="the first gradients travel while the next are computed; combined, they wait for the last of them",
    ),
)


def options(devices: Sequence[Any], preset: Preset, more: Iterable[Option] = ()) -> dict[str, Any]:
    """Returns what XLA is told for these devices, and for what else a layout needs: nothing for one, or a processor."""
    if preset == "plain" or len(devices) < 2 or devices[0].platform in ("cpu", "tpu"):
        return {}
    return {option.name: option.value for option in (*OVERLAPPED, *more)}


def compile_with(lowered: Any, told: Mapping[str, Any]) -> Any:
    """Returns the compiled program; options that this version of XLA has not are left out, with a warning."""
    import jax  # here: whoever reads a job has this module

    left = dict(told)
    while True:
        try:
            return lowered.compile(compiler_options=left) if left else lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            name = unknown_option(error)
            if name not in left:
                raise
            warnings.warn(without(name), stacklevel=2)
            del left[name]


def compile_for_lines(lowered: Any, program: Any, told: Mapping[str, Any]) -> Any:
    """Returns a compiled program whose instructions name the lines of source that it was lowered from.

    One that comes from JAX's cache names the lines of whoever compiled it first: of the file as it was then, or of
    another model that makes the same program. Where there is such a cache, it is compiled again, under its own key.
    """
    import jax  # here: whoever reads a job has this module

    if not jax.config.values["jax_compilation_cache_dir"]:
        return program
    setting = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[setting]
    jax.config.update(setting, True)
    try:
        return compile_with(lowered, {**told, _ANOTHER: "none"})
    finally:
        jax.config.update(setting, before)


def without(name: str) -> str:
    """Returns that an option is left out, as a sentence."""
    return f"this version of XLA has no option {name}: compiled without it"


def unknown_option(error: Exception) -> str:
    """Returns the name of the option that XLA says it has not, or nothing."""
    found = re.search(r"No such compile option: '(\w+)'", str(error))
    return found[1] if found else ""
