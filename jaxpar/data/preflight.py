"""Checks the beginning of a job's text before any of it is packed."""

from importlib.util import find_spec
from itertools import islice

import numpy as np

from jaxpar.data.corpus import blocks
from jaxpar.data.documents.plain_text import TextFile, WrongBytes
from jaxpar.data.rows.document_rows import length_note
from jaxpar.data.spec import OURS, Data
from jaxpar.data.text import check_length, text_files
from jaxpar.data.tokenizers.encode import open_corpus
from jaxpar.data.tokenizers.encoders import HuggingFaceEncoder, end_token
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import refuse

ROWS = 1000  # rows of the first file whose lengths are measured, and files whose beginning is checked
BEGINNING = 2**16  # bytes checked of each text file


def report_lengths(spec: Data) -> str:
    """Reports whether the first conversations fit a row; "" if they do, or if there are none to read.

    Raises:
      JaxparError: If a row is no conversation, or a package that reads it is missing.
    """
    if not spec.messages or spec.documents == "mixed" or find_spec("tokenizers") is None:
        return ""
    corpus = open_corpus(spec, text_files(spec)[:1])
    pieces = list(islice(corpus.pieces(), ROWS))
    counts = [len(ids) for ids in HuggingFaceEncoder(read_tokenizer(spec.tokenizer), spec.end).encode(pieces)]
    return length_note(np.array(counts, np.int64), "conversations at the beginning", spec)


def check_text(spec: Data) -> None:
    """Checks that there is text, that its first row is valid, and that the tokenizer has an end-of-document token.

    Raises:
      JaxparError: If a check fails.
    """
    if spec.tokenizer not in OURS:
        end_token(read_tokenizer(spec.tokenizer), spec.end)
    if spec.source == "stdlib":
        return
    files = text_files(spec)
    if spec.has_rows and next(open_corpus(spec, files[:1]).pieces(), None) is None:
        raise refuse(f"{files[0]} has no row", rule="a file of rows has at least one", fix="another data.path")
    for file in files[:ROWS] if spec.source == "text" else ():
        TextFile(file, WrongBytes()).check(next(blocks(file), b"")[:BEGINNING])
    if spec.source == "text" and spec.tokenizer == "bytes" and spec.documents == "mixed":
        check_length(sum(file.stat().st_size + 1 for file in files), spec)
