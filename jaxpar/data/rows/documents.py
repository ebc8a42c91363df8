"""Rows of whole documents, filled up to one length: each alone in its row, or several apart from each other.

    tokens     d0 d0 d0 e1 e1 f2 f2 f2 f2 f2 f2 g3 ...         seq = 6

    alone      d0 d0 d0 .  .  .  | e1 e1 .  .  .  . | f2 f2 f2 f2 f2 f2 | ...
    apart      d0 d0 d0 e1 e1 .  | f2 f2 f2 f2 f2 f2 | g3 ...
    segments    0  0  0  1  1  2 |  0  0  0  0  0  0 |          what fills up is a segment of its own, the last
    positions   0  1  2  0  1  0 |  0  1  2  3  4  5 |
    mask        1  1  0  1  0  0 |  1  1  1  1  1  0 |          the last token of a document predicts nothing

A row is a range of the file, so a plan of the rows is where each begins. Rows are filled in the order of the documents;
a document longer than a row is cut into rows, and each part but the last predicts the first token of the next.
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from jaxpar.data.spec import Batch, Data
from jaxpar.data.text import Tokens
from jaxpar.data.tokenizers import marks
from jaxpar.data.tokenizers.encoders import END
from jaxpar.errors import refuse

BLOCK = 2**21  # tokens that are looked at at once
ROUND = 64  # a data.seq that is suggested is a multiple of it
FILLED = 0  # what fills a row up: a token that nothing looks at


class Documents(Tokens):
    """Rows of whole documents: `inputs`, `targets`, `mask` [batch, seq], int32; apart also `segments`, `positions`."""

    def _count(self) -> int:
        self.bounds = plan(self._documents(), len(self.tokens), self.spec.seq, apart=self.spec.documents == "apart")
        self.kept = self._learning()
        starts = np.concatenate([[0], *self._documents()])
        what = "conversations" if self.spec.messages else "documents"
        note = length_note(np.diff(np.append(starts, len(self.tokens))), what, self.spec)
        self.notes = (note,) if note else ()
        return len(self.kept)

    def where(self, step: int, size: int, row: int) -> str:
        """Returns in words where a row of a training batch lies."""
        return f"from token {self.bounds[self.kept[self._chosen(step, size)[row]]]} of {self.file}"

    def _documents(self) -> Iterator[np.ndarray]:
        """Yields where documents end, block by block."""
        for begin in range(0, len(self.tokens), BLOCK):
            block = self._read(begin, min(BLOCK, len(self.tokens) - begin))
            if self.marked:
                ends = np.flatnonzero(marks.begins(block)) + begin
                yield ends[ends > 0]
            else:
                yield np.flatnonzero(block == END) + begin + 1

    def _learning(self) -> np.ndarray:
        """Returns the rows in which something is learned: a batch of others alone would have no loss.

        Raises:
          JaxparError: If there are none.
        """
        learned = np.zeros(len(self.bounds) - 1, np.int64)
        for begin in range(0, len(self.tokens), BLOCK):
            _, first, good = self._parted(self._read(begin, min(BLOCK, len(self.tokens) - begin)))
            targets = np.flatnonzero(good & ~first) + begin
            rows = np.searchsorted(self.bounds, targets, side="left") - 1  # of the token before it, which predicts it
            learned += np.bincount(rows[rows >= 0], minlength=len(learned))
        if not learned.any():
            raise refuse(
                f"{self.file} has no token that is learned",
                rule="conversations have answers, and documents more than one token",
                fix='data.learn = "all", or other data',
            )
        return np.flatnonzero(learned)

    def _rows(self, chosen: np.ndarray) -> Batch:
        shape = len(chosen), self.spec.seq
        made = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets", "mask")}
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, index in enumerate(self.kept[chosen]):
            begin, end = (int(each) for each in self.bounds[index : index + 2])
            count = end - begin
            tokens = self._read(begin, min(count + 1, len(self.tokens) - begin))
            ids, first, learned = self._parted(tokens)
            ahead = len(tokens) - 1  # tokens that have a next one
            made["inputs"][row, :count] = ids[:count]
            made["targets"][row, :ahead] = ids[1:]
            made["mask"][row, :ahead] = learned[1:] & ~first[1:]
            begins = np.concatenate([[True], first[1:count]])
            segments[row, :count] = np.cumsum(begins) - 1
            segments[row, count:] = begins.sum()
            positions[row, :count] = np.arange(count) - np.maximum.accumulate(np.where(begins, np.arange(count), 0))
        made["targets"][made["mask"] == 0] = FILLED
        if self.spec.documents == "apart":
            made |= {"segments": segments, "positions": positions}
        return made

    def _parted(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns ids, where documents begin and what is learned; of the first token not whether one begins."""
        if self.marked:
            return marks.ids(tokens), marks.begins(tokens), ~marks.unlearned(tokens)
        first = np.concatenate([[False], tokens[:-1] == END])
        return tokens.astype(np.int32), first, np.ones(len(tokens), bool)


def length_note(lengths: np.ndarray, what: str, spec: Data) -> str:
    """Returns in words how many documents do not fit a row, or that all are much shorter; "" otherwise.

    Args:
      lengths: Tokens of each document.
      what: The word for documents.
      spec: The `[data]` table.
    """
    longest, count = int(lengths.max(initial=0)), len(lengths)
    if longer := int((lengths > spec.seq).sum()):
        return (
            f"{longer:,} of {count:,} {what} are longer than data.seq = {spec.seq}: each is cut into rows, of which "
            "all but the first begin in its midst"
        )
    enough = -(-longest // ROUND) * ROUND
    if spec.documents == "alone" and 2 * enough <= spec.seq:
        return f"the longest of {count:,} {what} has {longest} tokens: data.seq = {enough} fills up less of each row"
    return ""


def plan(ends: Iterator[np.ndarray], total: int, seq: int, *, apart: bool) -> np.ndarray:
    """Returns where rows begin, and at last where the last one ends. Shape [rows + 1], int64.

    Args:
      ends: Where documents end, in their order; the last one may be left out.
      total: Tokens of all.
      seq: Tokens of a row.
      apart: Whether a row takes as many whole documents as fit; else one.
    """
    bounds, begin, last = [0], 0, 0
    for block in chain(ends, [np.array([total])]):
        for end in block.tolist():
            while end - begin > seq:  # what is before this document makes a row; of a long document, its beginning
                begin = last if apart and last > begin else begin + seq
                bounds.append(begin)
            last = end
            if not apart and end > begin:
                begin = end
                bounds.append(begin)
    if bounds[-1] < total:
        bounds.append(total)
    return np.array(bounds, np.int64)
