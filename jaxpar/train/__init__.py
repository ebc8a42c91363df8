"""The training loop: it reads batches, runs steps, writes metrics, evaluations and checkpoints, and handles faults.

Terms: a `Run` and its `Outcome`, `Faults` (the reaction to NaN, infinity and loss spikes), a rollback, skipped batches,
the lock of a run folder, metrics, `Noise` (of gradients and updates), and the watchdog, which detects lost processes.
`api/` has the Python functions `jp.train_step`, `jp.fit`, `jp.save` and `jp.restore`. `progress` writes the status line
of a terminal. `virtual_clock` simulates training with stale updates; `hogwild` trains with threads that race.

To add a reaction to a bad step: add a value to `Faults.on_bad_step`, and implement it in `loop.py` or in
`recovery.py`. To add a logger: add a class to `loggers/services.py`. To detect one more fault: add a check to
`watchdog/decisions.py`, and inject the fault in `tests/bench/faults/planted.py`.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "virtual_clock": "",
    "Race": "hogwild",
    "race": "hogwild",
}  # name to the module that defines it; "" if the name is a module itself
__all__ = [*_HOMES]  # the names that notebooks import  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _HOMES[name]:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
