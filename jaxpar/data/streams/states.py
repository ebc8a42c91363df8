"""The states of a stream that is read: a run goes on from the last one before its step, and draws the few after it.

    RUN/data/stream-0of2.jsonl     {"next": 128, "state": {...}, "batch": "9d41", "of": "mine:data"}
                                   {"next": 384, "state": {...}, "batch": "b7c9", "of": "mine:data"}

The state is that before batch 128 was drawn, beside a hash of that batch: so a state of another dataset, or a stream
that is not repeated, is found at once.

A line is added every so often, whether a checkpoint is saved or not: so any checkpoint, also an older one, has a state
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
KEPT = 4096  # lines; of more every second of the older ones is left out


class States:
    """The states of one stream on one process.

    Args:
      file: Where they are written.
      of: The stream that they are of; those of others do not count.
    """

    def __init__(self, file: Path, of: str):
        self.file, self.of, self._last = file, of, -EVERY
        self._from: int | None = None  # the step that the stream goes on from, until a state is written

    def before(self, step: int) -> tuple[int, Any, str] | None:
        """Returns the newest state at or before a step: which batch is next, the state, and the hash of that batch.

        States after that step are left out as soon as another is written: they may be of a run that was given up.
        """
        self._from = step
        found = [each for each in self._lines() if each["next"] <= step]
        best = max(found, key=lambda each: each["next"], default=None)
        return None if best is None else (best["next"], best["state"], str(best.get("batch", "")))

    def note(self, index: int, state: Any, batch: str) -> bool:
        """Writes the state before a batch was drawn, and its hash; false if it cannot be written as JSON."""
        try:
            line = json.dumps({"next": index, "state": state, "batch": batch, "of": self.of}, default=_plain)
        except (TypeError, ValueError):
            return False
        make_folder(self.file.parent)
        lines = self._lines()
        kept = lines if self._from is None else [each for each in lines if each["next"] <= self._from]
        if len(kept) >= KEPT:
            half = len(kept) // 2
            kept = [*kept[:half:2], *kept[half:]]
        if len(kept) < len(lines):
            part = partial_path(self.file)
            part.write_text("".join(json.dumps(each, default=_plain) + "\n" for each in kept), encoding="utf-8")
            part.replace(self.file)
        self._from = None
        with self.file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        self._last = time.monotonic()
        return True

    @property
    def is_due(self) -> bool:
        """Whether the last state is so old that another is written."""
        return time.monotonic() - self._last >= EVERY

    def _lines(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        found = []
        for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                made = json.loads(line, object_hook=_bytes)
            except ValueError:  # a process was killed while it wrote it: the one before it will do
                continue
            if isinstance(made, dict) and made.get("of") == self.of and isinstance(made.get("next"), int):
                found.append(made)
        return found


def _plain(value: Any) -> Any:
    """Returns a number of numpy's as one of Python's."""
    if isinstance(value, bytes):  # of grain's DataLoader
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


def hash_of(batch: Any) -> str:
    """Returns what tells a batch from others; "" of what is no dict."""
    if not isinstance(batch, Mapping):
        return ""
    digest = hashlib.sha256()
    for key in sorted(batch, key=str):
        value = np.asarray(batch[key])
        digest.update(f"{key}{value.shape}{value.dtype}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()[:16]
