"""Optimizers and learning-rate schedules by name, made of optax's own parts; and the noise of what they are fed.

`freeze` leaves some parameters alone, by `patterns` of their paths.

What is evaluated, sampled and exported where it is not what is trained: `eval_params`. What is a matrix to `muon`.

Those of optax that have no settings here are found by `named`, and tried on shapes by `probe`.

Nouns: `Optimizer` (settings, of which `chain` makes optax's), `pace` (schedules count steps), `Growth` (batches that
grow), `noise` (temperature of the updates, noise scale of the gradients).
"""

from importlib import import_module

_HOMES = {"Optimizer": "optimizer", "build": "chain"}
__all__ = [*_HOMES]  # the settings of a job's [optimizer], and what makes optax's of them  # pyright: ignore


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
