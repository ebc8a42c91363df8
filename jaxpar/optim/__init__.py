"""Optimizers and learning-rate schedules by name, built from optax.

`wrappers` freeze parameters, by `patterns` of their paths, let schedules count steps, and update layers separately.

`eval_params`: parameters to evaluate, sample and export if they differ from the trained ones. `muon`: which parameters
are matrices.

`optax_lookup` looks up other optimizers and schedules of optax, and tries them on shapes.

Terms: `Optimizer` (settings, from which `optax_chain` builds the chain), `Growth` (batches that grow).
"""

from importlib import import_module

_HOMES = {"Optimizer": "optimizer", "build": "optax_chain"}
__all__ = [*_HOMES]  # the settings of a job's [optimizer], and the function that builds optax's  # pyright: ignore


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
