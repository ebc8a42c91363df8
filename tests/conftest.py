"""Eight simulated devices, and compiled programs kept between runs."""

import gc
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxpar-tests-cache"))
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # the time goes into compiling tiny programs
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

import jaxpar as jp

jp.simulate(8)
MAPPINGS = 20_000  # Linux gives a process 65,530; programs on processors take dozens each, and XLA crashes without


@pytest.fixture(autouse=True)
def forgotten_programs():
    """Forgets what was compiled, once it takes many of the mappings that a process may have."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()
