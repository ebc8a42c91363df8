"""Eight simulated devices, compiled programs kept between runs, one shared way to train a few steps."""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxpar-tests-cache"))
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # the time goes into compiling tiny programs
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jaxpar as jp

jp.simulate(8)
