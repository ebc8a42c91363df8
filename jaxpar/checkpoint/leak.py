"""Stops a leak of TensorStore, by which a process grew with every save: by 12 KiB, and by 0.4 KiB per array.

    Orbax asks in each save         TensorStore answers by         asked here instead
    for each array, its file        Spec.to_json(): a dict         Spec.path: text
    twice, the bytes written        metrics as dicts               the same metrics as text

TensorStore 0.1.86 makes dicts in one place, `JsonToPyObject` of python/tensorstore/json_type_caster.cc. It releases its
references to a key and a value to `PyDict_SetItem`, which takes none over: it adds its own. So each key and each value
of such a dict has one reference too many, and is never freed. The answers given here are equal, and come without a dict
that TensorStore made. Nothing is replaced where TensorStore no longer leaks, or where Orbax has no such function.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

RAW_BYTES = "get_tensorstore_raw_bytes"  # Orbax's function for its log: the bytes written or read so far
ENDINGS = {"write": "_bytes_written", "read": "_bytes_read"}  # of the metrics that it adds up


@functools.cache
def stop() -> tuple[str, ...]:
    """Replaces in this process the functions that leak, or by which Orbax does; returns the names of those."""
    import tensorstore as ts

    if not is_there(ts.KvStore.Spec):
        return ()
    ts.KvStore.Spec.to_json = to_json_of(ts.KvStore.Spec)
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError:
        return ("to_json",)
    asked = getattr(tensorstore_utils, RAW_BYTES, None)
    if asked is None or list(inspect.signature(asked).parameters) != ["direction"]:
        return ("to_json",)
    setattr(tensorstore_utils, RAW_BYTES, raw_bytes_of(asked))
    return ("to_json", RAW_BYTES)


def is_there(Spec: Any) -> bool:
    """Returns whether a text from a dict of TensorStore's has more references than one from a dict made here."""
    path = "/".join(["", "file", ""])
    theirs, ours = Spec({"driver": "file", "path": path}).to_json(), {"path": "/".join(["", "file", ""])}
    leaked, freed = theirs.pop("path"), ours.pop("path")
    return sys.getrefcount(leaked) > sys.getrefcount(freed)


def to_json_of(Spec: Any) -> Callable[..., Any]:
    """Returns `KvStore.Spec.to_json` that makes the dict of a plain file itself, and leaves others to TensorStore."""
    nowhere = Spec({"driver": "file", "path": ""})

    @functools.wraps(Spec.to_json)
    def to_json(self: Any, include_defaults: bool = False) -> Any:
        if self.path and not include_defaults and self == nowhere + self.path:
            return {"driver": "file", "path": self.path}
        return to_json.__wrapped__(self, include_defaults)

    return to_json


def raw_bytes_of(asked: Callable[..., int]) -> Callable[..., int]:
    """Returns Orbax's function that adds up the bytes written, or read, from the metrics as text."""
    import tensorstore as ts

    @functools.wraps(asked)
    def raw_bytes(direction: Any = None) -> int:
        ending = ENDINGS.get(getattr(direction, "value", "write"))
        if ending is None:
            return asked(direction)
        lines = ts.experimental_collect_prometheus_format_metrics("/tensorstore/kvstore/")
        metrics = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return sum(int(value) for name, _, value in metrics if name.endswith(ending) and value.isdigit())

    return raw_bytes
