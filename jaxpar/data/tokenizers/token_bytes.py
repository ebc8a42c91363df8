"""Counts the bytes of text that each token stands for, where the tokenizer alone decides them.

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

from jaxpar.data.tokenizers.encoders import load
from jaxpar.data.tokenizers.tokenizer_facts import TokenizerFacts, read_tokenizer

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
