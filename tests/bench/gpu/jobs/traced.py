"""What a GPU ran, kernel by kernel, as its profiler saw it."""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

GPU, STREAM = "/device:GPU", "Stream"  # of the lines of a GPU, those of its streams; others repeat what streams ran


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of one kernel.

    Attributes:
      instruction: The HLO instruction that it is of; "" where the profiler does not know.
      start: Seconds.
      end: Seconds.
    """

    instruction: str
    start: float
    end: float


def trace(run: Callable[[], Any]) -> list[Kernel]:
    """Returns the kernels of a function that waits for its own end, in the order in which they began."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="jaxpar-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = sorted(Path(folder).rglob("*.trace.json.gz"))
        found = [kernel for file in files for kernel in kernels(json.loads(gzip.decompress(file.read_bytes())))]
    return sorted(found, key=lambda kernel: kernel.start)


def kernels(said: dict[str, Any]) -> Iterator[Kernel]:
    """Yields the kernels of a profile in Chrome's format: all that a stream of a GPU ran.

    On a processor, in a rehearsal, all that is known by its instruction.
    """
    events = said["traceEvents"]
    named = {key: {} for key in ("process_name", "thread_name")}
    for event in events:
        if event.get("ph") == "M" and event["name"] in named:
            named[event["name"]][event["pid"], event.get("tid")] = event["args"]["name"]
    gpus = {pid for (pid, _), name in named["process_name"].items() if name.startswith(GPU)}
    streams = {at for at, name in named["thread_name"].items() if at[0] in gpus and name.startswith(STREAM)}
    for event in events:
        if event.get("ph") != "X":
            continue
        instruction = event.get("args", {}).get("hlo_op", "")
        if (event["pid"], event["tid"]) in streams if gpus else instruction:
            start = event["ts"] * 1e-6
            yield Kernel(instruction, start, start + event.get("dur", 0.0) * 1e-6)


def gaps(kernels: Sequence[Kernel]) -> list[float]:
    """Returns the times in which no kernel ran, from the first one's start to the last one's end; the longest first.

    Args:
      kernels: In the order in which they began.
    """
    found, until = [], kernels[0].start if kernels else 0.0
    for kernel in kernels:
        if kernel.start > until:
            found.append(kernel.start - until)
        until = max(until, kernel.end)
    return sorted(found, reverse=True)


def by_instruction(kernels: Sequence[Kernel], *, steps: int) -> dict[str, float]:
    """Returns the seconds of each instruction in one of so many equal steps, the longest first."""
    found: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        found[kernel.instruction] += (kernel.end - kernel.start) / steps
    return dict(sorted(found.items(), key=lambda item: -item[1]))
