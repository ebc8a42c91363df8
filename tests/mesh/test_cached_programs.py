"""Programs that JAX's persistent cache has kept run on simulated devices without waiting for each other for ever."""

import os
import subprocess
import sys

import pytest

# XLA ends the process where collectives wait for each other longer than that
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=20"
RUNS = """
import numpy as np, optax, jaxpar as jp
jp.simulate(8)
from tiny import Staged, batches, token_loss
data = {name: np.concatenate([value] * 4) for name, value in next(batches(1)).items()}
for _ in range(12):  # the first compiles, the others are read from the cache; without care every fourth stalled
    layout = jp.compose(lambda rngs: Staged(rngs, layers=2), jp.Parallel(data=2, fsdp=4))
    step = jp.train_step(layout, token_loss, optax.adam(1e-3))
    jp.fit(step, data, steps=4, batch=16)
print("done")
"""


@pytest.mark.nightly
def test_programs_of_the_persistent_cache_end(tmp_path):
    own = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": PATIENCE, "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    paths = os.pathsep.join([*sys.path[:1], os.path.dirname(os.path.dirname(__file__))])
    own["PYTHONPATH"] = os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", RUNS], env=os.environ | own, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("done\n")
