"""Works around a memory leak of TensorStore: a process grew by 12 KiB with every save, and by 0.4 KiB per array.

    Orbax asks in each save         TensorStore answers with       replaced here by
    for each array, its file        Spec.to_json(): a dict         Spec.path: text
    twice, the bytes written        metrics as dicts               the same metrics as text

TensorStore 0.1.86 makes all dicts in `JsonToPyObject` (python/tensorstore/json_type_caster.cc). It releases its
references to a key and a value to `PyDict_SetItem`, which does not steal them: it adds its own. So each key and each
value of such a dict has one reference too many, and is never freed. The replacements return equal values without a dict
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
    """Replaces the functions that leak, in this process; returns the names of those that were replaced."""
    # imported here: a run without checkpoints imports neither TensorStore nor Orbax
    import tensorstore as ts

    if not is_there(ts.KvStore.Spec):
        return ()
    ts.KvStore.Spec.to_json = to_json_of(ts.KvStore.Spec)
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError:
        return ("to_json",)
    asked = getattr(tensorstore_utils, RAW_BYTES, None)
    # a private function of Orbax's: with another signature it is another function, and leaking is better than failing
    if asked is None or list(inspect.signature(asked).parameters) != ["direction"]:
        return ("to_json",)
    setattr(tensorstore_utils, RAW_BYTES, raw_bytes_of(asked))
    return ("to_json", RAW_BYTES)


def is_there(Spec: Any) -> bool:
    """Returns whether TensorStore leaks: a string from a dict of its own has more references than one from ours."""
    # measured, not decided by version: a fixed release or a patched build is left alone. Both strings are made at run
    # time, as a literal has further references
    path = "/".join(["", "file", ""])
    theirs, ours = Spec({"driver": "file", "path": path}).to_json(), {"path": "/".join(["", "file", ""])}
    leaked, freed = theirs.pop("path"), ours.pop("path")
    return sys.getrefcount(leaked) > sys.getrefcount(freed)


def to_json_of(Spec: Any) -> Callable[..., Any]:
    """Returns a `KvStore.Spec.to_json` that makes the dict of a plain file in Python, and passes others on."""
    nowhere = Spec({"driver": "file", "path": ""})

    @functools.wraps(Spec.to_json)
    def to_json(self: Any, include_defaults: bool = False) -> Any:
        # only a spec that equals one made from driver and path alone: with any other option the dict has more keys
        if self.path and not include_defaults and self == nowhere + self.path:
            return {"driver": "file", "path": self.path}
        return to_json.__wrapped__(self, include_defaults)

    return to_json


def raw_bytes_of(asked: Callable[..., int]) -> Callable[..., int]:
    """Returns Orbax's function that adds up the bytes written or read, here from metrics in Prometheus' text format."""
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
