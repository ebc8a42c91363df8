"""Encodes documents in batches of pieces, in order, on a thread parallel to reading and writing."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from jaxpar.data.corpus import Corpus
from jaxpar.data.documents.piece import START, Piece, Place
from jaxpar.data.documents.row_files import RowCorpus
from jaxpar.data.spec import Data
from jaxpar.data.tokenizers.chat import load_template
from jaxpar.data.tokenizers.encoders import Encoder
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer

AT_ONCE = 2**21  # characters per batch of pieces; their tokens take ten times as much memory
MOST = 4096  # pieces per batch


def open_corpus(spec: Data, files: Iterable[Path]) -> Corpus:
    """The documents of these files, read as the `[data]` table says."""
    if not spec.has_rows:
        return Corpus(tuple(files))
    template = load_template(read_tokenizer(spec.tokenizer)) if spec.messages else None
    return RowCorpus(tuple(files), column=spec.messages or spec.column, chat=template, answers=spec.learn == "answers")


def token_settings(spec: Data) -> str:
    """Settings that decide the tokens of given files, as text to hash; "" for plain text in bytes or a trained BPE."""
    if not spec.is_marked:
        return ""
    settings = [
        spec.source,
        spec.tokenizer if spec.tokenizer in ("bytes", "bpe") else read_tokenizer(spec.tokenizer).digest,
    ]
    return "\n".join([*settings, str(spec.tokens), spec.end, spec.column, spec.messages, spec.learn])


def encode_documents(
    corpus: Corpus, encoder: Encoder, read: Callable[[int], None], place: Place = START
) -> Iterator[tuple[np.ndarray, Place]]:
    """Yields the tokens of documents from a place on, with the place after them.

    Args:
      corpus: The documents.
      encoder: Runs on a thread, while the next pieces are read and the last tokens are written.
      read: Called with the number of bytes of the files that were tokenized.
      place: Where to begin.
    """
    groups = _groups(corpus.pieces(place, encoder.seam))
    with ThreadPoolExecutor(1) as worker:
        pending = None
        for group in groups:
            ready, pending = pending, (group, worker.submit(_encode, encoder, group))
            if ready is not None:
                yield ready[1].result(), ready[0][-1].next
                read(sum(piece.size for piece in ready[0]))
        if pending is not None:
            yield pending[1].result(), pending[0][-1].next
            read(sum(piece.size for piece in pending[0]))


def _encode(encoder: Encoder, group: list[Piece]) -> np.ndarray:
    return np.concatenate(encoder.encode(group))


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= AT_ONCE or len(group) == MOST:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_from(corpus: Corpus, encoder: Encoder, read: Callable[[int], None]):
    """The function from a place to the tokens from there on, which `journal.write_tokens` calls."""
    return partial(encode_documents, corpus, encoder, read)
