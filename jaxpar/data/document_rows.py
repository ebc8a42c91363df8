"""Rows of whole documents, padded to one length: one document per row, or several separated by segment ids.

    tokens     d0 d0 d0 e1 e1 f2 f2 f2 f2 f2 f2 g3 ...         seq = 6

    alone      d0 d0 d0 .  .  .  | e1 e1 .  .  .  . | f2 f2 f2 f2 f2 f2 | ...
    apart      d0 d0 d0 e1 e1 .  | f2 f2 f2 f2 f2 f2 | g3 ...
    segments    0  0  0  1  1  2 |  0  0  0  0  0  0 |          the padding is the last segment
    positions   0  1  2  0  1  0 |  0  1  2  3  4  5 |
    mask        1  1  0  1  0  0 |  1  1  1  1  1  0 |          the last token of a document predicts nothing

A row is a range of the file, so an array of row starts describes all rows. Rows contain the documents in order. A
document longer than a row is cut into rows, and each part except the last predicts the first token of the next part.

A batch of preferences has two rows for each pair, of the chosen and of the rejected answer; seq = 5:

    tokens            c0 c0 c0 c0 r0 r0 r0 c1 c1 r1 r1 r1 ...
                      └ chosen ─┘ └rejected┘
    chosen_inputs     c0 c0 c0 .  .  | c1 .  ...
    rejected_inputs   r0 r0 .  .  .  | r1 r1 ...
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from jaxpar.data.packed import document_starts, ignored_by_loss, token_ids
from jaxpar.data.spec import Batch, Data
from jaxpar.data.text import Tokens
from jaxpar.data.tokenizers.encoders import END
from jaxpar.errors import refuse

BLOCK = 2**21  # tokens per read of the scan for documents
ROUND = 64  # a suggested data.seq is a multiple of it
PADDING_TOKEN = 0  # the padding token, which the mask hides from the loss
SIDES = ("chosen", "rejected")


class DocumentRows(Tokens):
    """Rows of documents: `inputs`, `targets`, `mask` [batch, seq], int32; "apart" adds `segments`, `positions`."""

    def _count(self) -> int:
        self.bounds = row_bounds(
            self._document_ends(), len(self.tokens), self.spec.seq, apart=self.spec.documents == "apart"
        )
        self.learned_rows = self._find_learned_rows()
        starts = np.concatenate([[0], *self._document_ends()])
        noun = "conversations" if self.spec.messages else "documents"
        note = length_note(np.diff(np.append(starts, len(self.tokens))), noun, self.spec)
        self.notes = (note,) if note else ()
        return len(self.learned_rows)

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        return f"from token {self.bounds[self.learned_rows[self._batch_indices(step, size)[row]]]} of {self.file}"

    def _document_ends(self) -> Iterator[np.ndarray]:
        """Yields the ends of documents, block by block; if tokens are marked, without the end of the last document."""
        for begin in range(0, len(self.tokens), BLOCK):
            block = self._read(begin, min(BLOCK, len(self.tokens) - begin))
            if self.marked:
                ends = np.flatnonzero(document_starts(block)) + begin
                yield ends[ends > 0]
            else:
                yield np.flatnonzero(block == END) + begin + 1

    def _find_learned_rows(self) -> np.ndarray:
        """Returns the indices of rows with at least one learned token, since a batch without any has no loss.

        Raises:
          JaxparError: If there are no such rows.
        """
        learned = np.zeros(len(self.bounds) - 1, np.int64)
        for begin in range(0, len(self.tokens), BLOCK):
            _, first, learnable = self._split_flags(self._read(begin, min(BLOCK, len(self.tokens) - begin)))
            targets = np.flatnonzero(learnable & ~first) + begin
            rows = np.searchsorted(self.bounds, targets, side="left") - 1  # row of the token before, which predicts it
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
        batch = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets", "mask")}
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, index in enumerate(self.learned_rows[chosen]):
            begin, end = (int(bound) for bound in self.bounds[index : index + 2])
            count = end - begin
            tokens = self._read(begin, min(count + 1, len(self.tokens) - begin))
            ids, first, learned = self._split_flags(tokens)
            target_count = len(tokens) - 1  # tokens with a successor in the file
            batch["inputs"][row, :count] = ids[:count]
            batch["targets"][row, :target_count] = ids[1:]
            batch["mask"][row, :target_count] = learned[1:] & ~first[1:]
            begins = np.concatenate([[True], first[1:count]])
            segments[row, :count] = np.cumsum(begins) - 1
            segments[row, count:] = begins.sum()
            positions[row, :count] = np.arange(count) - np.maximum.accumulate(np.where(begins, np.arange(count), 0))
        batch["targets"][batch["mask"] == 0] = PADDING_TOKEN
        if self.spec.documents == "apart":
            batch |= {"segments": segments, "positions": positions}
        return batch

    def _split_flags(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Splits tokens into ids, document starts (without flag bits, not at the first token), and learned tokens."""
        if self.marked:
            return token_ids(tokens), document_starts(tokens), ~ignored_by_loss(tokens)
        first = np.concatenate([[False], tokens[:-1] == END])
        return tokens.astype(np.int32), first, np.ones(len(tokens), bool)


def length_note(lengths: np.ndarray, what: str, spec: Data) -> str:
    """Reports how many documents are longer than a row, or that all are much shorter; "" otherwise.

    Args:
      lengths: Tokens of each document.
      what: The noun for documents.
      spec: The `[data]` table.
    """
    longest, count = int(lengths.max(initial=0)), len(lengths)
    if longer := int((lengths > spec.seq).sum()):
        return (
            f"{longer:,} of {count:,} {what} are longer than data.seq = {spec.seq}: each is cut into rows, of which "
            "all but the first begin in its midst"
        )
    suggested = -(-longest // ROUND) * ROUND
    if spec.documents == "alone" and 2 * suggested <= spec.seq:
        return f"the longest of {count:,} {what} has {longest} tokens: data.seq = {suggested} fills up less of each row"
    return ""


def row_bounds(ends: Iterator[np.ndarray], total: int, seq: int, *, apart: bool) -> np.ndarray:
    """Returns the starts of all rows and the end of the last. Shape [rows + 1], int64.

    Args:
      ends: Ends of documents in order, block by block; the end of the last may be omitted.
      total: Number of tokens.
      seq: Tokens per row.
      apart: Whether a row contains as many whole documents as fit, or only one.
    """
    bounds, begin, last = [0], 0, 0
    for block in chain(ends, [np.array([total])]):
        for end in block.tolist():
            while end - begin > seq:  # a row ends before this document, or, if it is too long, inside it
                begin = last if apart and last > begin else begin + seq
                bounds.append(begin)
            last = end
            if not apart and end > begin:
                begin = end
                bounds.append(begin)
    if bounds[-1] < total:
        bounds.append(total)
    return np.array(bounds, np.int64)


class PreferencePairs(DocumentRows):
    """Pairs of rows: `inputs`, `targets`, `mask` [batch, seq], int32, each for `chosen` and for `rejected`.

    A pair is left out if one of its documents does not fit a row: people judged the whole answers, not truncated ones.
    If the end of a prompt becomes one token with the beginning of one answer, the loss counts it in both rows, as in
    TRL: both log-probabilities then cover the same part of the text.
    """

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
