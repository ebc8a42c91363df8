"""Batches of preferences: for each pair, the row of the chosen and that of the rejected answer.

    tokens            c0 c0 c0 c0 r0 r0 r0 c1 c1 r1 r1 r1 ...     seq = 5
                      └ chosen ─┘ └rejected┘

    chosen_inputs     c0 c0 c0 .  .  | c1 .  ...
    rejected_inputs   r0 r0 .  .  .  | r1 r1 ...

A pair is left out if one of its documents does not fit a row: people judged the whole answers, not truncated ones. If
the end of a prompt becomes one token with the beginning of one answer, the loss counts it in both rows, as in TRL: both
log-probabilities then cover the same part of the text.
"""

import numpy as np

from jaxpar.data.document_rows import DocumentRows
from jaxpar.data.spec import Batch
from jaxpar.errors import refuse

SIDES = ("chosen", "rejected")


class PreferencePairs(DocumentRows):
    """Pairs of rows: `inputs`, `targets`, `mask` [batch, seq], int32, each for `chosen` and for `rejected`."""

    def _count(self) -> int:
        starts = np.concatenate([[0], *self._document_ends(), [len(self.tokens)]])
        self.starts = starts.astype(np.int64)
        lengths = np.diff(self.starts)
        longest = np.maximum(lengths[0::2], lengths[1::2]) - 1  # the last token of a document is no input
        self.pairs = np.flatnonzero(longest <= self.spec.seq)
        left_out = len(longest) - len(self.pairs)
        if not len(self.pairs):
            raise refuse(
                f"the shortest of {len(longest):,} pairs needs data.seq = {int(longest.min())}, it is {self.spec.seq}",
                rule="a pair is trained on if both of its answers fit, with their prompt",
                fix=f"data.seq = {int(longest.max())}",
            )
        note = (
            f"{left_out:,} of {len(longest):,} pairs are left out: with their prompt they are longer than data.seq = "
            f"{self.spec.seq}"
        )
        self.notes = (note,) if left_out else ()
        return len(self.pairs)

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        return f"pair {self.pairs[self._batch_indices(step, size)[row]]} of {self.file}"

    def _rows(self, chosen: np.ndarray) -> Batch:
        shape = len(chosen), self.spec.seq
        batch = {
            f"{side}_{name}": np.zeros(shape, np.int32) for side in SIDES for name in ("inputs", "targets", "mask")
        }
        for row, pair in enumerate(self.pairs[chosen]):
            documents = [self._document(2 * int(pair) + offset) for offset in range(2)]
            answer_begin = min(int(np.argmax(learned)) for _, learned in documents if learned.any())
            for side, (ids, learned) in zip(SIDES, documents, strict=True):
                learned[answer_begin : np.argmax(learned)] = True
                count = len(ids) - 1
                batch[f"{side}_inputs"][row, :count] = ids[:-1]
                batch[f"{side}_targets"][row, :count] = np.where(learned[1:], ids[1:], 0)
                batch[f"{side}_mask"][row, :count] = learned[1:]
        return batch

    def _document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of a document, and a mask of the tokens that the loss counts."""
        begin, end = (int(bound) for bound in self.starts[index : index + 2])
        ids, _, learned = self._split_flags(self._read(begin, end - begin))
        return ids, learned
