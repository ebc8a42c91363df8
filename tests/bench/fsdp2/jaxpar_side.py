"""jaxpar's side: FSDP over two processes, declared as a user declares it."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.cluster.connect import connect
from jaxpar.cluster.environment import detect
from jaxpar.mesh.devices import simulate

from .. import expert
from ..fsdp2.turns import serve
from ..overhead.ours import like_expert


def steps(settings: dict[str, Any], *, remat: bool) -> Callable[[int], float]:
    """Returns what makes so many steps and returns the last loss."""
    train, model = settings["train"], expert.Llama(**settings["model"], remat=remat, unrolled=not remat)
    adamw = optax.adamw(train["learning_rate"], train["beta1"], train["beta2"], weight_decay=train["weight_decay"])
    optimizer = optax.chain(optax.clip_by_global_norm(train["clip"]), adamw)
    step = like_expert(model, {"fsdp": jax.process_count()}, optimizer)
    state = jp.init_state(step.layout, optimizer)
    tokens = np.random.default_rng(0).integers(0, model.vocab, (train["rows"], model.seq + 1), dtype=np.int32)
    batch = step.put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})

    def run(count: int) -> float:
        nonlocal state
        for _ in range(count):
            state, metrics = step(state, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return run


if __name__ == "__main__":
    if cluster := detect(os.environ):
        connect(cluster)
        simulate(cluster.processes, processes=cluster.processes)
    given = json.loads(sys.argv[1])
    serve(jp.__version__, {"none": steps(given, remat=False), "full": steps(given, remat=True)})
