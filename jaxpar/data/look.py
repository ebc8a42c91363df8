"""What can be said about the text of a job before any of it is packed."""

from importlib.util import find_spec
from itertools import islice

import numpy as np

from jaxpar.data.corpus import blocks
from jaxpar.data.documents.plain_text import TextFile, WrongBytes
from jaxpar.data.rows.documents import length_note
from jaxpar.data.spec import OURS, Data
from jaxpar.data.text import check_length, text_files
from jaxpar.data.tokenizers.encode import corpus_of
from jaxpar.data.tokenizers.encoders import HuggingFace, end_of
from jaxpar.data.tokenizers.saved import saved
from jaxpar.errors import refuse

ROWS = 1000  # of a file, whose lengths are looked at; and files whose beginning is
BEGINNING = 2**16  # bytes of a file of text


def lengths(spec: Data) -> str:
    """Returns in words how the first conversations fit a row; "" where they do, or none are read.

    Raises:
      JaxparError: If a row is none, or a package is missing that reads it.
    """
    if not spec.messages or spec.documents == "mixed" or find_spec("tokenizers") is None:
        return ""
    corpus = corpus_of(spec, text_files(spec)[:1])
    pieces = list(islice(corpus.pieces(), ROWS))
    counts = [len(each) for each in HuggingFace(saved(spec.tokenizer), spec.end).encode(pieces)]
    return length_note(np.array(counts, np.int64), "conversations at the beginning", spec)


def look(spec: Data) -> None:
    """Checks that there is text, that its first row is one, and that the tokenizer knows how a document ends.

    Raises:
      JaxparError: If not.
    """
    if spec.tokenizer not in OURS:
        end_of(saved(spec.tokenizer), spec.end)
    if spec.source == "stdlib":
        return
    files = text_files(spec)
    if spec.has_rows and next(corpus_of(spec, files[:1]).pieces(), None) is None:
        raise refuse(f"{files[0]} has no row", rule="a file of rows has at least one", fix="another data.path")
    for file in files[:ROWS] if spec.source == "text" else ():
        TextFile(file, WrongBytes()).check(next(blocks(file), b"")[:BEGINNING])
    if spec.source == "text" and spec.tokenizer == "bytes" and spec.documents == "mixed":
        check_length(sum(file.stat().st_size + 1 for file in files), spec)
