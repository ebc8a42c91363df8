"""The loop of a run: batches in; metrics, evaluations and checkpoints out; and the handling of faults.

Nouns: a `Run` and its `Outcome`, `Faults` (how to go on after bad numbers), a rollback, skipped batches, the lock of a
run folder, metrics, `Noise` (of gradients and updates), and the watchdog by which processes notice each other's end.
`api/` has the functions of Python: `jp.train_step`, `jp.fit`, `jp.save`, `jp.restore`. `progress` writes the status
line on a terminal. `virtual_clock` trains by a table of late updates, simulated; `hogwild` trains by threads that race.

To add a reaction to bad numbers: a value of `Faults.on_bad_step`, and its place in `loop.py` or in
`recovery/roll_back.py`. To add a metric sink: a writer beside those in `metrics.py`. To add a fault that is detected: a
judgement in `watchdog/decisions.py`, and the fault planted in `tests/bench/faults/planted.py`.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "elastic_virtual_clock": "",
    "virtual_clock": "",
    "Race": "hogwild",
    "race": "hogwild",
}  # a name's module; "" for one
__all__ = [*_HOMES]  # what a notebook imports  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _HOMES[name]:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
