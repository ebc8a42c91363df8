"""XLA's compiler for NVIDIA GPUs, where it is installed without the runtime. Imports no JAX."""

import logging
from collections.abc import Callable
from importlib.util import find_spec

PLUGIN = "jax_plugins.xla_cuda13"


def hush_plugin() -> None:
    """Silences the plugin's warnings that its runtime half is missing, which compiling does not need."""
    _drop(PLUGIN, lambda message: "is not found" in message)
    if find_spec("jax_cuda13_plugin") is None:  # otherwise the warning is a real problem
        _drop("jax._src.xla_bridge", lambda message: PLUGIN in message)


def _drop(logger: str, unwanted: Callable[[str], bool]) -> None:
    log = logging.getLogger(logger)
    if not log.filters:
        log.addFilter(lambda record: not unwanted(record.getMessage()))
