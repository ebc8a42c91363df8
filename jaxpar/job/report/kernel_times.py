"""The profile of a run on its page: kernel time by kind from the trace, next to the planner's prediction by cause.

    RUN/profile/steps_100_103/ ─► `read` ─► `StepProfile` ─► `render`

Reads the trace in Chrome's format with the standard library; needs no jax. On processors a trace has no kernels of a
GPU, and the page says so instead of showing times.
"""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import file_errors
from jaxpar.html.markup import Markup, badge, table, tag
from jaxpar.units import show_seconds

GPU, STREAM = "/device:GPU", "Stream"  # other lines of a GPU in the trace list the same kernels again

# Kinds of kernels: the first pattern that matches the kernel's name or that of its HLO instruction decides. Names are
# those of NCCL, cuBLAS (nvjet, xmma, gemm, cutlass), cuDNN and XLA's fusions.
KINDS = {
    "all-reduce": r"all_?-?reduce(?!_?-?scatter)",
    "reduce-scatter": r"reduce_?-?scatter",
    "all-gather": r"all_?-?gather",
    "all-to-all": r"all_?-?to_?-?all|ragged-all",
    "permute": r"collective_?-?permute|sendrecv|nccldevkernel_(send|recv)|\bsend\b|\brecv\b",
    "other collectives": r"nccl|broadcast_?-?collective|collective",
    "attention": r"fmha|flash|attention",
    "convolutions": r"conv(olution)?[_\d.]|fprop|dgrad|wgrad|implicit_gemm",
    "matrix products": r"gemm|nvjet|cublas|cutlass|xmma|matmul|splitk|(^|[\W_])dot([\W_]|$)",
    "copies": r"memcpy|memset|(^|[\W_])copy([\W_]|$)|transpose",
}
REST = "elementwise and reductions"
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "permute", "other collectives")
# the planner's causes that name the same work as a kind of kernels
CAUSES = {
    "matrix products": ("matmuls", "recompute"),
    "attention": ("attention",),
    REST: ("elementwise", "optimizer"),
}


@dataclass(frozen=True)
class StepProfile:
    """A profile of some steps.

    Attributes:
      folder: The folder of the trace.
      first: The first traced step.
      last: The last traced step.
      seconds: Seconds per step, by the clock of the host, with the profiler's own cost.
      kernels: Seconds per step and GPU by kind of kernel, the longest first; empty without a GPU.
      gpus: GPUs in the trace: those of the host that wrote it.
    """

    folder: Path
    first: int
    last: int
    seconds: float
    kernels: Mapping[str, float]
    gpus: int

    @property
    def steps(self) -> int:
        """Number of traced steps."""
        return self.last - self.first + 1


def read(folder: Path) -> list[StepProfile]:
    """Reads the profiles of a run folder; traces that were interrupted are left out.

    Raises:
      JaxparError: If a file of a profile is damaged.
    """
    return [_read(file) for file in sorted(folder.glob("profile/*/steps.json"))]


def kind_of_kernel(name: str, instruction: str = "") -> str:
    """Classifies a kernel.

    >>> kind_of_kernel("ncclDevKernel_AllGather_RING_LL"), kind_of_kernel("nvjet_tst_128x256_64x4")
    ('all-gather', 'matrix products')
    """
    text = f"{name} {instruction}".lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), REST)


def _read(file: Path) -> StepProfile:
    rule, fix = "a report reads the profile that a run has written", f"rm -r {file.parent}"
    with file_errors(file, rule=rule, fix=fix):
        facts = json.loads(file.read_text(encoding="utf-8"))
        first, last, seconds = int(facts["first"]), int(facts["last"]), float(facts["seconds"])
        steps = max(1, last - first + 1)
    totals: dict[str, float] = defaultdict(float)
    gpus: set[Any] = set()
    for trace in sorted(file.parent.rglob("*.trace.json.gz")):
        with file_errors(trace, rule=rule, fix=fix):
            for gpu, kind, duration in _kernels(_load(trace)):
                gpus.add((trace, gpu))
                totals[kind] += duration
    shares = {kind: total / steps / len(gpus) for kind, total in sorted(totals.items(), key=lambda item: -item[1])}
    return StepProfile(file.parent, first, last, seconds / steps, shares, len(gpus))


def _load(trace: Path) -> dict[str, Any]:
    try:
        return json.loads(gzip.decompress(trace.read_bytes()))
    except (EOFError, zlib.error) as error:  # such as a trace that is only partly copied
        raise ValueError(f"no whole gzip file: {error}") from error


def _kernels(trace: Mapping[str, Any]) -> Iterator[tuple[Any, str, float]]:
    """Yields (process of the GPU, kind, seconds) of each kernel on a stream of a GPU."""
    events = trace["traceEvents"]
    names = {kind: {} for kind in ("process_name", "thread_name")}
    for event in events:
        if event.get("ph") == "M" and event.get("name") in names:
            names[event["name"]][event["pid"], event.get("tid")] = event["args"]["name"]
    gpus = {pid for (pid, _), name in names["process_name"].items() if name.startswith(GPU)}
    streams = {key for key, name in names["thread_name"].items() if key[0] in gpus and name.startswith(STREAM)}
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams:
            kind = kind_of_kernel(event["name"], str(event.get("args", {}).get("hlo_op", "")))
            yield event["pid"], kind, float(event.get("dur", 0.0)) * 1e-6


def render(profile: StepProfile, run: Path, prediction: Mapping[str, Any]) -> Markup:
    """Renders a profile: the link, and kernel time by kind, measured and predicted.

    Args:
      profile: The profile.
      run: The run folder.
      prediction: The result of `predict`: `causes`, the planner's cause to seconds, or `why` there are none.
    """
    place = str(profile.folder.relative_to(run))
    parts = [
        tag("p", f"Steps {profile.first} to {profile.last}, traced by jax.profiler: ", tag("a", place, href=place)),
        tag("p", f"xprof --logdir {profile.folder}; or open its .trace.json.gz in ui.perfetto.dev.", cls="jx-small"),
    ]
    if not profile.kernels:
        note = (
            "No kernel times are shown: this trace is of processors. Simulated devices share their cores, so it shows "
            "the order of a step's operations and the waits of the host, not how long a GPU takes for any of them, nor "
            "what collectives cost between GPUs."
        )
        return tag("div", *parts, tag("p", note, cls="jx-small"))
    causes: Mapping[str, float] = prediction.get("causes", {})
    rows = [(kind, show_seconds(seconds), _predicted(kind, causes)) for kind, seconds in profile.kernels.items()]
    named = {cause for group in CAUSES.values() for cause in group}
    rows += [(cause, "-", show_seconds(seconds)) for cause, seconds in causes.items() if cause not in named and seconds]
    total = show_seconds(sum(causes.values())) if causes else "-"
    rows += [("all kernels", show_seconds(sum(profile.kernels.values())), "-")]
    rows += [("a step", show_seconds(profile.seconds), total)]
    badges = tag("tr", tag("td", ""), tag("td", badge("measured")), tag("td", badge("modelled")))
    head = ("per step and GPU", f"trace of {profile.gpus} GPUs", "planner")
    times = Markup(table("Kernel time by kind", head, rows, "tnn").replace("<tbody>", f"<tbody>{badges}", 1))
    notes = [
        "Kernels of several streams run at the same time, so their sum may exceed a step. A kernel's kind follows from "
        "its name. The planner counts only communication that computation does not hide, by mesh axis, so its rows "
        "cannot be compared with those of collectives. The profiler itself slows a step.",
        *([f"No prediction by the planner: {prediction['why']}."] if "why" in prediction else []),
    ]
    return tag("div", *parts, times, *[tag("p", note, cls="jx-small") for note in notes])


def _predicted(kind: str, causes: Mapping[str, float]) -> str:
    if kind not in CAUSES or not causes:
        return "-"
    return show_seconds(sum(causes.get(cause, 0.0) for cause in CAUSES[kind]))
