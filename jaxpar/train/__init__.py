"""The loop of a run: batches in; metrics, evaluations and checkpoints out; and the handling of faults.

Nouns: a `Run` and its `Outcome`, `Faults` (how to go on after bad numbers), a rollback, skipped batches, the lock of a
run folder, metrics, `Noise` (of gradients and updates), and the watchdog by which processes notice each other's end.
`doors/` is what Python has of it: `jp.fit`, `jp.save`, `jp.restore`; `live/` the line on a terminal that says what is
waited for. `on_clock` trains as a table of updates says: gradients that are late, simulated; `hogwild` by threads that
race, for real.

To add a reaction to bad numbers: a value of `Faults.on_bad_step`, and its place in `loop.py` or in
`recovery/roll_back.py`. To add a metric sink: a writer beside those in `metrics.py`. To add a fault that is detected: a
judgement in `watchdog/judge.py`, and the fault planted in `bench/faults/planted.py`.
"""

from importlib import import_module
from typing import Any

_HOMES = {"elastic_on_clock": "", "on_clock": "", "Race": "hogwild", "race": "hogwild"}  # a name's module; "" for one
__all__ = [*_HOMES]  # what a notebook imports  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _HOMES[name]:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
