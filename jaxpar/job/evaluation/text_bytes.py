"""Counts the target tokens of an evaluation set that the loss counts, and the bytes of their text.

The tokenizer alone decides the bytes of a token:

bytes                  1 for every token, also for the zero that ends a document
byte-level BPE         the length of the token: each of its letters stands for a byte; 0 for a special token
any other tokenizer    unknown: a normalizer or a space that is added before the text changes the bytes
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.spec import Data
from jaxpar.data.text import Tokens
from jaxpar.data.tokenizers.encoders import load
from jaxpar.data.tokenizers.tokenizer_facts import TokenizerFacts, read_tokenizer
from jaxpar.data.tokens import bpe_file
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.measures import derived_metrics
from jaxpar.train.feed import Feed

NEXT_TOKEN = "next_token"
BYTES = 256


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of each token.

    Attributes:
      counts: Bytes by token id. Shape [vocab], int64; None if the tokens alone do not decide them.
      reason: Why they do not; "" if they do.
    """

    counts: np.ndarray | None
    reason: str = ""


def token_bytes(tokenizer: str | Path) -> TokenBytes:
    """Returns the bytes of each token of a tokenizer.

    Args:
      tokenizer: "bytes", or the path of a Hugging Face tokenizer.

    Raises:
      JaxparError: If the tokenizer cannot be read.
    """
    if tokenizer == "bytes":
        return TokenBytes(np.ones(BYTES, np.int64))
    facts = read_tokenizer(tokenizer)
    state = json.loads(load(facts).to_str())
    if reason := _why_unknown(state):
        return TokenBytes(None, f"the tokenizer {facts.file} {reason}, so its tokens alone do not decide their bytes")
    return TokenBytes(_count_bytes(facts, state))


def _count_bytes(facts: TokenizerFacts, state: Mapping[str, Any]) -> np.ndarray:
    counts = np.zeros(facts.size, np.int64)
    for text, number in state["model"]["vocab"].items():
        counts[number] = len(text)
    for token in state.get("added_tokens") or ():
        counts[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return counts


def _why_unknown(state: Mapping[str, Any]) -> str:
    """Returns the reason why tokens do not decide their bytes; "" if each letter of a token is one byte."""
    if state.get("normalizer"):
        return "normalizes the text"
    decoders = [step for step in _steps(state.get("decoder"), "decoders") if step["type"] == "ByteLevel"]
    vocab = state["model"].get("vocab")
    if state["model"].get("type") != "BPE" or not decoders or not isinstance(vocab, dict):
        return "is no byte-level BPE"
    steps = [step for step in _steps(state.get("pre_tokenizer"), "pretokenizers") if step["type"] == "ByteLevel"]
    if any(step.get("add_prefix_space") for step in steps):
        return "adds a space before the text"
    if sum(len(text) == 1 for text in vocab) < BYTES:
        return "lacks a token for some bytes"
    return ""


def _steps(part: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a decoder or pre-tokenizer, also those within a sequence."""
    if part and part["type"] == "Sequence":
        for inner in part[key]:
            yield from _steps(inner, key)
    elif part:
        yield part


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
