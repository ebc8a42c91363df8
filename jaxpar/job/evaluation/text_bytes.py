"""Counts the target tokens of an evaluation set that the loss counts, and the bytes of their text."""

from dataclasses import dataclass

import numpy as np

from jaxpar.data.spec import Data
from jaxpar.data.text import Tokens
from jaxpar.data.tokenizers.token_bytes import TokenBytes, token_bytes
from jaxpar.data.tokens import bpe_file
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.measures import derived_metrics
from jaxpar.train.feed import Feed

NEXT_TOKEN = "next_token"


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """The size of the text that an evaluation set counts.

    Attributes:
      tokens: The target tokens that count.
      bytes: The bytes of text that they stand for; 0 if unknown.
      reason: Why the bytes are unknown; "" if they are known.
      derived: The metrics to compute from the mean loss.
    """

    tokens: int = 0
    bytes: int = 0
    reason: str = ""
    derived: tuple[str, ...] = ()

    def why_unknown(self, count: float) -> str:
        """Returns why bits per byte cannot be computed from a loss with this count; "" if they can."""
        reason = self.reason
        if not reason and round(count) != self.tokens:
            reason = f"the loss counts {count:,.0f} terms, and the text has {self.tokens:,} target tokens"
        return f"bits_per_byte is not printed: {reason}" if reason else ""


def text_size(job: Job, name: str, feed: Feed) -> TextSize:
    """Returns the size of the text of a set.

    Args:
      job: The job of the evaluation.
      name: The name of the set; "" is the data of the job.
      feed: The batches of the set.

    Raises:
      JaxparError: If the tokenizer or a batch cannot be read.
    """
    is_text_loss = job.train.loss == NEXT_TOKEN
    derived = tuple(
        dict.fromkeys(["perplexity"] * is_text_loss + [x for x in derived_metrics(job) if x == "perplexity"])
    )
    spec = job.data.evaluation_set(name) if name else job.data
    if not is_text_loss:
        return TextSize(derived=derived, reason=f"train.loss = {job.train.loss!r} need not be one per token of text")
    if not spec.is_text:
        return TextSize(derived=derived, reason=f"data.source = {spec.source!r} does not say which text its tokens are")
    table = _token_bytes(spec, feed)
    if table.counts is None:
        return TextSize(derived=derived, reason=table.reason)
    tokens, total = _count(feed, table.counts, job.train.eval_batches)
    if not total:
        return TextSize(derived=derived, reason="the targets have no byte of text")
    return TextSize(derived=derived, tokens=tokens, bytes=total)


def _token_bytes(spec: Data, feed: Feed) -> TokenBytes:
    if spec.tokenizer != "bpe":
        return token_bytes(spec.tokenizer)
    if not isinstance(feed.source, Tokens):
        return TokenBytes(None, "each entry of data.weights has a bpe of its own")
    return token_bytes(bpe_file(feed.source.file.parent, spec.vocab, feed.source.fingerprint))


def _count(feed: Feed, counts: np.ndarray, most: int) -> tuple[int, int]:
    """Returns the target tokens that count, and their bytes; each example counts once."""
    tokens = total = index = 0
    while (not most or index < most) and (batches := feed.read_evaluation(index)):
        rows = slice(batches[0].examples or None)
        batch = batches[0].batch
        targets = np.asarray(batch["targets"])[rows]
        learned = np.asarray(batch["mask"])[rows] != 0 if "mask" in batch else np.ones(targets.shape, bool)
        tokens += int(learned.sum())
        total += int(counts[targets[learned]].sum())
        index += 1
    return tokens, total
