"""Maps a step to the index of its batch when batches have been skipped: a pure function of the step.

step   0 1 2 3 4 5 6 ...         step 3 skips 2 batches
batch  0 1 2 5 6 7 8 ...

If the batch grows, "step" means a draw: one batch of the first phase's size (`jaxpar.optim.growth`).

RUN/skipped_batches.json records the skipped batches, so that a resumed run skips the same ones.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from jaxpar.errors import file_errors
from jaxpar.files import make_folder, write_json


@dataclass(frozen=True, slots=True)
class Skip:
    """Consecutive batches that the run skips.

    Attributes:
      at: The first step, from 0, that reads a later batch, because earlier ones are skipped.
      past: Number of skipped batches.
      why: The reason.
    """

    at: int
    past: int
    why: str


class SkippedBatches:
    """The batches that a run skips.

    Args:
      folder: The run folder.
      fresh: Whether the run starts from scratch: a file of an earlier run is then deleted.

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

    def batch_index(self, step: int) -> int:
        """Returns the index of a step's batch, both from 0."""
        return step + sum(skip.past for skip in self.all if skip.at <= step)

    def skip(self, step: int, why: str) -> None:
        """Skips the batch of a step, from 0: this step and all later ones take the next batch."""
        self._write([*self.all, Skip(step, 1, why)])

    def go_back(self, bad: int, *, to: int, why: str) -> None:
        """Records a rollback to step `to`. Step `to` + 1 then reads the batch that follows the batch of step `bad`."""
        past = self.batch_index(bad - 1) + 1 - self.batch_index(to)
        self.rollbacks += 1
        self._write([*(skip for skip in self.all if skip.at <= to), Skip(to, past, why)])

    def _write(self, skipped: list[Skip]) -> None:
        self.all = skipped
        if jax.process_index() == 0:
            make_folder(self.file.parent)
            write_json(self.file, {"rollbacks": self.rollbacks, "skipped": [asdict(skip) for skip in skipped]})
