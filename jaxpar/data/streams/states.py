"""Saved states of a stream: a run resumes from the last state before its step, and draws the few batches after it.

    RUN/data/stream-0of2.jsonl     {"next": 128, "state": {...}, "batch": "9d41", "of": "mine:data"}
                                   {"next": 384, "state": {...}, "batch": "b7c9", "of": "mine:data"}

The state is the one before batch 128 was drawn, with a hash of that batch: so the state of another dataset, or a stream
that does not repeat, is detected at the first batch.

A line is added every `EVERY` seconds, independent of checkpoints: so any checkpoint, also an older one, has a state
before it, and no save waits for a stream.
"""

import base64
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.files import make_folder, partial_path

EVERY = 10.0  # seconds between two states
BYTES = "bytes in base64"
KEPT = 4096  # lines; above, every second one of the older half is dropped


class SavedStates:
    """The states of one stream on one process.

    Args:
      file: The file of states.
      stream_name: Name of the stream; states of other streams in the file are ignored.
    """

    def __init__(self, file: Path, stream_name: str):
        self.file, self.stream_name, self._last = file, stream_name, -EVERY
        self._from: int | None = None  # the step that the stream resumed at, until a state is written

    def latest_before(self, step: int) -> tuple[int, Any, str] | None:
        """Returns the newest state at or before a step as (next batch, state, hash of that batch).

        The next `note` deletes states after that step: they may be of an abandoned run.
        """
        self._from = step
        candidates = [record for record in self._lines() if record["next"] <= step]
        latest = max(candidates, key=lambda record: record["next"], default=None)
        return None if latest is None else (latest["next"], latest["state"], str(latest.get("batch", "")))

    def append(self, index: int, state: Any, batch: str) -> bool:
        """Appends the state before batch `index` and the hash of that batch; False if the state is no JSON."""
        try:
            line = json.dumps({"next": index, "state": state, "batch": batch, "of": self.stream_name}, default=_plain)
        except (TypeError, ValueError):
            return False
        make_folder(self.file.parent)
        lines = self._lines()
        records = lines if self._from is None else [item for item in lines if item["next"] <= self._from]
        if len(records) >= KEPT:
            half = len(records) // 2
            records = [*records[:half:2], *records[half:]]
        if len(records) < len(lines):
            partial = partial_path(self.file)
            partial.write_text("".join(json.dumps(item, default=_plain) + "\n" for item in records), encoding="utf-8")
            partial.replace(self.file)
        self._from = None
        with self.file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        self._last = time.monotonic()
        return True

    @property
    def is_due(self) -> bool:
        """Whether `EVERY` seconds have passed since the last state."""
        return time.monotonic() - self._last >= EVERY

    def _lines(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        records = []
        for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line, object_hook=_bytes)
            except ValueError:  # truncated by a kill: the line before it is used
                continue
            if (
                isinstance(record, dict)
                and record.get("of") == self.stream_name
                and isinstance(record.get("next"), int)
            ):
                records.append(record)
        return records


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):  # in the state of grain's DataLoader
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


def hash_of(batch: Any) -> str:
    """Hash of a batch; "" if it is no dict."""
    if not isinstance(batch, Mapping):
        return ""
    digest = hashlib.sha256()
    for key in sorted(batch, key=str):
        value = np.asarray(batch[key])
        digest.update(f"{key}{value.shape}{value.dtype}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()[:16]
