"""Optimizers and learning-rate schedules by name, built from optax; and the noise scales of gradients and updates.

`freeze` excludes parameters from training, by `patterns` of their paths.

`eval_params`: parameters to evaluate, sample and export if they differ from the trained ones. `muon`: which parameters
are matrices.

`optax_lookup` looks up other optimizers and schedules of optax, and tries them on shapes.

Nouns: `Optimizer` (settings, from which `chain` builds the optax chain), `schedule_steps` (schedules count steps),
`Growth` (batches that grow), `noise` (temperature of the updates, noise scale of the gradients).
"""

from importlib import import_module

_HOMES = {"Optimizer": "optimizer", "build": "chain"}
__all__ = [*_HOMES]  # the settings of a job's [optimizer], and the function that builds optax's  # pyright: ignore


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
