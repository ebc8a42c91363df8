"""The data sources of a job.

stdlib    the source code of this machine's Python: real text, no download
text      any file, folder or glob: each file is a document
jsonl     lines of JSON, each one a document: a column of text or of messages
parquet   rows of Parquet, likewise
digits    scikit-learn's handwritten digits
arrays    .npz, .npy or a folder of .npy; a flat .npy of integers and a .bin are token ids
pkg:name  an object with `batch(step, size)`, a map-style dataset, an iterable of batches, or a function returning one
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.data.arrays import Arrays, load_arrays, load_digits
from jaxpar.data.packing import pack, print_to_stderr
from jaxpar.data.rows.document_rows import DocumentRows
from jaxpar.data.rows.mixture import Mixture
from jaxpar.data.rows.token_stream import TokenStream, is_token_stream
from jaxpar.data.spec import Data, Source, check_path
from jaxpar.data.streams.user_data import open_user_data
from jaxpar.data.text import Tokens, stdlib_files, text_files
from jaxpar.data.tokenizers.encode import open_corpus
from jaxpar.errors import refuse


def open_data(
    spec: Data, folder: str | Path = "runs/data", *, seed: int = 0, named: Any = None, held_out: Any = None
) -> Source:
    """Opens the source of a job.

    Args:
      spec: The `[data]` table.
      folder: Folder of packed tokens and the tokenizer.
      seed: Seed of the shuffle.
      named: The user's object, for `package.module:name`.
      held_out: The user's object of held-out examples, if it is another object.

    Raises:
      JaxparError: If there is nothing to read, or it cannot be read.
    """
    folder = Path(folder)
    check_path(spec)
    if spec.is_text:
        return _of_text(spec, folder, seed)
    if spec.source == "digits":
        return Arrays(load_digits(), spec, seed)
    if spec.source == "arrays" and is_token_stream(Path(str(spec.path))):
        return TokenStream(Path(str(spec.path)), spec, seed)
    if spec.source == "arrays":
        return Arrays(load_arrays(Path(str(spec.path))), spec, seed)
    if named is None:
        raise refuse(
            f"data.source = {spec.source!r} without its object",
            rule="a job imports the object that it names; in Python the caller passes it",
            fix="jp.open_data(data, named=my_batches)",
        )
    return open_user_data(spec, named, folder, seed=seed, held=held_out)


def _of_text(spec: Data, folder: Path, seed: int) -> Source:
    if spec.weights:
        entries = [replace(spec, path=entry, weights=()) for entry in spec.path]
        return Mixture([_rows_of(entry, folder, seed) for entry in entries], spec.weights)
    return _rows_of(spec, folder, seed)


def _rows_of(spec: Data, folder: Path, seed: int) -> Tokens:
    files = stdlib_files() if spec.source == "stdlib" else text_files(spec, print_to_stderr)
    file, packed = pack(open_corpus(spec, files), spec, folder)
    return (Tokens if spec.documents == "mixed" else DocumentRows)(file, packed, spec, seed)
