"""Baselines for a job: the expert's step in raw JAX (`bench/expert.py`, without jaxpar), and torch.compile."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from ... import expert
from ...gpu.jobs.training import CLIP, Training, elementwise

SECONDS = 60.0  # for PyTorch to compile and run


def expert_step(job: Training, device: Any) -> tuple[Callable[[Any], Any], Any]:
    """Returns a step of the expert, state to state, and its first state."""
    gpu = device.platform == "gpu"
    model = expert.Llama(
        vocab=job.vocab, seq=job.seq, layers=job.layers, dim=job.dim, heads=job.heads, hidden=job.hidden,
        remat=job.remat == "full", unrolled=not job.scan, dtype="bfloat16" if job.precision == "bf16" else "float32",
        attention="cudnn" if gpu and job.precision == "bf16" else "xla",
    )  # fmt: skip
    mesh, optimizer = expert.make_mesh([device]), elementwise()
    step, batch = expert.build(model, optimizer, mesh, clip=CLIP), job.batches()
    tokens, targets = (jax.device_put(batch[name], device) for name in ("inputs", "targets"))

    def born(key: jax.Array) -> Any:
        params = expert.init(model, key)
        return params, optimizer.init(params)

    state = jax.jit(born, out_shardings=expert.shardings(model, optimizer, mesh))(jax.random.key(0))
    return lambda state: step(state, tokens, targets)[0], state


def torch_step(job: Training, *, cuda: bool) -> dict[str, Any]:
    """Returns the seconds of PyTorch's step, measured by another process; why there are none, where there are none.

    That process runs before this one takes the GPU's memory.
    """
    if find_spec("torch") is None:
        return {"absent": "no torch here"}
    command = [
        sys.executable,
        str(Path(__file__).with_name("torch_twin.py")),
        json.dumps(asdict(job)),
        "cuda" if cuda else "cpu",
    ]
    try:
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"absent": f"torch.compile was not ready within {SECONDS:g} s"}
    if done.returncode:
        return {"absent": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])
