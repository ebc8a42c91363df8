"""The sources that a job may train on.

stdlib    the source code of this machine's Python: real text, no download
text      any file, folder or glob: each file is a document
jsonl     lines of JSON, each of them a document: a column of text or of messages
parquet   rows of Parquet, likewise
digits    scikit-learn's handwritten digits
arrays    .npz, .npy or a folder of .npy; a flat .npy of integers and a .bin are token ids
pkg:name  an object with `batch(step, size)`, a dataset by number, an iterable of batches, or what makes one
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.data.arrays import Arrays, load_arrays, load_digits
from jaxpar.data.packing import pack, say_aside
from jaxpar.data.rows.documents import Documents
from jaxpar.data.rows.mixture import Mixture
from jaxpar.data.rows.token_stream import TokenStream, is_token_stream
from jaxpar.data.spec import Data, Source, check_path
from jaxpar.data.streams.opening import open_own
from jaxpar.data.text import Tokens, stdlib_files, text_files
from jaxpar.data.tokenizers.encode import corpus_of
from jaxpar.errors import refuse


def open_data(
    spec: Data, folder: str | Path = "runs/data", *, seed: int = 0, named: Any = None, held: Any = None
) -> Source:
    """Returns the source of a job.

    Args:
      spec: The `[data]` table.
      folder: Where packed tokens and the tokenizer are kept.
      seed: Of the order of examples.
      named: The user's object, for `package.module:name`.
      held: The user's object of held-out examples, if it is another.

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
            rule="a job imports the object that it names; in Python it is given",
            fix="jp.open_data(data, named=my_batches)",
        )
    return open_own(spec, named, folder, seed=seed, held=held)


def _of_text(spec: Data, folder: Path, seed: int) -> Source:
    """Returns the rows of packed tokens; of several sets, mixed."""
    if spec.weights:
        entries = [replace(spec, path=each, weights=()) for each in spec.path]
        return Mixture([_rows_of(each, folder, seed) for each in entries], spec.weights)
    return _rows_of(spec, folder, seed)


def _rows_of(spec: Data, folder: Path, seed: int) -> Tokens:
    files = stdlib_files() if spec.source == "stdlib" else text_files(spec, say_aside)
    file, packed = pack(corpus_of(spec, files), spec, folder)
    return (Tokens if spec.documents == "mixed" else Documents)(file, packed, spec, seed)
