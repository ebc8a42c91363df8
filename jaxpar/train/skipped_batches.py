"""Maps a step to its batch, where some have been skipped: still a pure function of the step.

step   0 1 2 3 4 5 6 ...         step 3 skips 2 batches
batch  0 1 2 5 6 7 8 ...

RUN/skipped_batches.json remembers them, so that a run that is resumed passes over the same.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax

from jaxpar.data.iterables import some
from jaxpar.data.spec import Batch, Rows, Source, Weighted
from jaxpar.data.validate import BatchSpec, CorruptBatch
from jaxpar.errors import reading, refuse
from jaxpar.files import make_folder, write_json
from jaxpar.train.faults import Faults


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
            with reading(
                self.file,
                rule="it says which batches the run passed over",
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


class CheckedSource:
    """A source whose batches are looked at before they are fed, and that skips what the run skips.

    Args:
      source: Where batches come from.
      skipped: The run's.
      sound: What a good batch is.
      faults: What is done about one that is not.
      say: Where it is told that a batch was passed over.
    """

    def __init__(
        self, source: Source, skipped: SkippedBatches, sound: BatchSpec, faults: Faults, say: Callable[[str], None]
    ):
        self.source, self.skipped, self.sound, self.faults, self.say = source, skipped, sound, faults, say
        self.fingerprint = source.fingerprint
        self._bad_out: list[int] = []  # held-out batches that are corrupt, in their order

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step, or some of its rows.

        Where corrupt ones are skipped, every process reads all rows: all must come to the same.

        Raises:
          JaxparError: If it is corrupt, and the job does not skip such ones; or too many are, one after the other.
        """
        passed: list[CorruptBatch] = []
        while True:
            index = self.skipped.batch_of(step)
            try:
                return self._read(index, size, rows)
            except CorruptBatch as error:
                self._pass(f"the batch of step {step + 1}", error, passed)
                self.skipped.pass_over(step, error.problems[0].got)

    def _read(self, index: int, size: int, rows: Rows) -> Batch:
        alone = rows if self.faults.on_bad_batch == "stop" else None
        where = getattr(self.source, "where", None)
        lies = partial(where, index, size) if where else lambda _: f"batch {index} of {self.fingerprint}"
        batch = self.sound.checked(self.source.batch(index, size, alone), lies, alone)
        return some(batch, None if alone is rows else rows)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th held-out examples that are not corrupt, or some rows of their batches.

        Raises:
          JaxparError: If one is, and the job does not skip such ones.
        """
        passed: list[CorruptBatch] = []
        while True:
            at = index
            for bad in self._bad_out:
                at += bad <= at
            alone = rows if self.faults.on_bad_batch == "stop" else None
            try:
                batches = self.source.evaluation(at, size, alone)
                for each in batches:
                    self.sound.checked(each.batch, lambda _, at=at: f"held-out batch {at}", alone)
                return [Weighted(each.weight, some(each.batch, None if alone is rows else rows)) for each in batches]
            except CorruptBatch as error:
                self._pass("a held-out batch", error, passed)
                self._bad_out = sorted([*self._bad_out, at])

    def _pass(self, what: str, error: CorruptBatch, passed: list[CorruptBatch]) -> None:
        """Says that a batch is passed over; raises if the job stops there, or too many were."""
        problem = error.problems[0]
        got = f"{what} is corrupt: {problem.got}"
        if self.faults.on_bad_batch == "stop":
            raise refuse(got, rule=problem.rule, fix=f"{problem.fix}; or faults.on_bad_batch = 'skip'") from error
        passed.append(error)
        if len(passed) > self.faults.skips:
            raise refuse(
                f"{len(passed)} corrupt batches one after the other, the last: {problem.got}",
                rule=f"faults.skips = {self.faults.skips} may be skipped in a row",
                fix=problem.fix,
            ) from error
        self.say(f"{got}; passed over")
