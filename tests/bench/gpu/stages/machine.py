"""The machine: the GPU's name, its clocks and its memory, how fast it copies, and what `jaxpar doctor` finds."""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpar.mesh.devices import visible_devices
from jaxpar.mesh.memory_pool import NAME as SHARE

from ...gpu.stage import Stage
from ...gpu.work import Work

CLOCKS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
    "memory.total",
)
LIMIT = "import jax; print((jax.local_devices()[0].memory_stats() or {}).get('bytes_limit'))"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage.

    Attributes:
      shares: Of the GPU's memory, that a process takes.
      copied: Bytes of an array that is copied.
    """

    shares: tuple[float, ...]
    copied: int


def run(work: Work) -> None:
    """Measures; other processes look first, as this one takes the GPU's memory."""
    work.measure("doctor", _doctor)
    for share in work.sizes.shares:
        work.measure(f"memory at a share of {share}", lambda share=share: _memory(share, work))
    work.measure("clocks", _clocks)
    device = visible_devices()[0]
    work.measure("device", lambda: {"kind": device.device_kind, "stats": device.memory_stats()})
    work.measure("copy on the device", lambda: _copy(work))
    work.measure("copy to the device", lambda: _across(work.sizes.copied, device, back=False))
    work.measure("copy from the device", lambda: _across(work.sizes.copied, device, back=True))


def said(command: list[str], **variables: str) -> str:
    """Returns what a command prints; its last words where it fails."""
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr.strip()[-300:]


def _doctor() -> dict[str, Any]:
    lines = said([sys.executable, "-m", "jaxpar", "doctor"]).splitlines()
    return {"result": lines[-1] if lines else "", "found": [line for line in lines if not line.startswith("ok ")][:20]}


def _memory(share: float, work: Work) -> dict[str, Any]:
    found = said([sys.executable, "-c", LIMIT], **{SHARE: str(share)}).splitlines()[-1]
    return {
        "limit_bytes": json.loads(found) if found.isdecimal() else None,
        "predicted_bytes": int(work.hardware.chip.visible_memory * share),
        "said": found,
    }


def _clocks() -> dict[str, Any]:
    try:
        found = said(["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits"])
    except OSError as error:
        return {"absent": str(error)}
    return dict(zip(CLOCKS, found.splitlines()[0].split(", "), strict=False)) if found else {"absent": "nothing said"}


def _copy(work: Work) -> dict[str, Any]:
    """Returns the bytes per second that one array is read and another is written with."""
    x = jax.random.normal(jax.random.key(0), (work.sizes.copied // 4,))

    def build(repeats: int):
        def body(x):
            for _ in range(repeats):
                x = jax.lax.optimization_barrier(x + 1)
            return x

        return jax.jit(body, donate_argnums=0)

    moved = 2 * x.nbytes
    seconds = work.once(build, x, rounds=10, pretended=moved / work.hardware.chip.bandwidth)
    return {"seconds": seconds, "bytes_per_second": moved / seconds, "sheet": work.hardware.chip.bandwidth}


def _across(size: int, device: Any, *, back: bool) -> dict[str, Any]:
    host = np.random.default_rng(0).random(size // 8)
    spent = []
    for _ in range(4):
        begin = time.perf_counter()
        there = jax.block_until_ready(jax.device_put(host, device))
        middle = time.perf_counter()
        np.asarray(there)
        spent.append((time.perf_counter() - middle) if back else (middle - begin))
    seconds = statistics.median(spent)
    return {"seconds": seconds, "bytes_per_second": host.nbytes / seconds}


STAGE = Stage(
    name="machine", seconds=20, limit=60,
    measures="name, clocks, memory at two shares, bandwidth of copies, what jaxpar doctor finds",
    beside="the table of chips",
    real=Sizes(shares=(0.75, 0.92), copied=2**30), tiny=Sizes(shares=(0.75,), copied=2**12),
    run=run,
)  # fmt: skip
