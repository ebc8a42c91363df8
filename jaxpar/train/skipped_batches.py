"""Maps a step to its batch, where some have been skipped: still a pure function of the step.

step   0 1 2 3 4 5 6 ...         step 3 skips 2 batches
batch  0 1 2 5 6 7 8 ...

Of a batch that grows, "step" is a draw: as many as the first phase would have steps (`jaxpar.optim.growth`).

RUN/skipped_batches.json remembers them, so that a run that is resumed passes over the same.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from jaxpar.errors import file_errors
from jaxpar.files import make_folder, write_json


@dataclass(frozen=True, slots=True)
class Skip:
    """Batches that were passed over.

    Attributes:
      at: The first step, from 0, that takes a later batch.
      past: How many batches later.
      why: What was wrong.
    """

    at: int
    past: int
    why: str


class SkippedBatches:
    """The batches that a run skips.

    Args:
      folder: The run folder.
      fresh: Whether the run starts anew, so that what is written there is of another.

    Raises:
      JaxparError: If the file is damaged.
    """

    def __init__(self, folder: Path, *, fresh: bool):
        self.file = folder / "skipped_batches.json"
        self.rollbacks, self.all = 0, []
        if fresh and jax.process_index() == 0:
            self.file.unlink(missing_ok=True)
        if not fresh and self.file.exists():
            with file_errors(
                self.file,
                rule="the file lists the batches that the run skips, as JSON",
                fix=f"rm {self.file}, if it passed over none",
            ):
                found = json.loads(self.file.read_text())
                self.rollbacks = int(found["rollbacks"])
                self.all = [Skip(int(each["at"]), int(each["past"]), str(each["why"])) for each in found["skipped"]]

    def batch_of(self, step: int) -> int:
        """Returns the batch that a step takes, both from 0."""
        return step + sum(skip.past for skip in self.all if skip.at <= step)

    def pass_over(self, step: int, why: str) -> None:
        """Makes a step, from 0, and all after it take the batch after the one that it would have taken."""
        self._write([*self.all, Skip(step, 1, why)])

    def go_back(self, bad: int, *, to: int, why: str) -> None:
        """Makes the step after `to` take the batch after that of step `bad`, both from 1."""
        past = self.batch_of(bad - 1) + 1 - self.batch_of(to)
        self.rollbacks += 1
        self._write([*(skip for skip in self.all if skip.at <= to), Skip(to, past, why)])

    def _write(self, skipped: list[Skip]) -> None:
        self.all = skipped
        if jax.process_index() == 0:
            make_folder(self.file.parent)
            write_json(self.file, {"rollbacks": self.rollbacks, "skipped": [asdict(skip) for skip in skipped]})
