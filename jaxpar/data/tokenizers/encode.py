"""Documents to the tokens of a file: many pieces at once, in their order."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from jaxpar.data.corpus import Corpus
from jaxpar.data.documents.piece import START, Piece, Place
from jaxpar.data.documents.rows import Rows
from jaxpar.data.spec import Data
from jaxpar.data.tokenizers.chat import chat
from jaxpar.data.tokenizers.encoders import Encoder
from jaxpar.data.tokenizers.saved import saved

AT_ONCE = 2**21  # bytes of pieces that are tokenized at once; their tokens take ten times as much
MOST = 4096  # pieces that are


def corpus_of(spec: Data, files: Iterable[Path]) -> Corpus:
    """Returns the documents of a job in these files."""
    if not spec.has_rows:
        return Corpus(tuple(files))
    template = chat(saved(spec.tokenizer)) if spec.messages else None
    return Rows(tuple(files), column=spec.messages or spec.column, chat=template, answers=spec.learn == "answers")


def settings_of(spec: Data) -> str:
    """Returns all but the files that decides their tokens; "" for plain text in bytes or a bpe of its own."""
    if not spec.is_marked:
        return ""
    said = [spec.source, spec.tokenizer if spec.tokenizer in ("bytes", "bpe") else saved(spec.tokenizer).digest]
    return "\n".join([*said, str(spec.tokens), spec.end, spec.column, spec.messages, spec.learn])


def encoded(
    corpus: Corpus, encoder: Encoder, read: Callable[[int], None], place: Place = START
) -> Iterator[tuple[np.ndarray, Place]]:
    """Yields the tokens of documents from a place on, with the place after them.

    Args:
      corpus: The documents.
      encoder: Makes their tokens; on a thread of its own, beside the reading of the next and the writing of these.
      read: Is told how many bytes of the files were tokenized.
      place: Where to begin.
    """
    groups = _groups(corpus.pieces(place, encoder.seam))
    with ThreadPoolExecutor(1) as worker:
        ahead = None
        for group in groups:
            now, ahead = ahead, (group, worker.submit(_encode, encoder, group))
            if now is not None:
                yield now[1].result(), now[0][-1].next
                read(sum(each.size for each in now[0]))
        if ahead is not None:
            yield ahead[1].result(), ahead[0][-1].next
            read(sum(each.size for each in ahead[0]))


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


def from_place(corpus: Corpus, encoder: Encoder, read: Callable[[int], None]):
    """Returns what a journal asks for: a place to the tokens from it on."""
    return partial(encoded, corpus, encoder, read)
