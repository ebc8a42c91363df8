"""Text is tokenized once: by one process of those that share a folder, while the others wait for it.

is it there, and every byte as it was written? ──yes──► train
          │ no: the others wait from here on
          └─► digest ─► tokenizer ─► tokens, in parallel and in their order ─► on the disk ─► its list
"""

import fcntl
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data import journal, packed
from jaxpar.data.corpus import Corpus
from jaxpar.data.packed import Packed
from jaxpar.data.spec import OURS, Data
from jaxpar.data.tokenizers.encode import from_place, settings_of
from jaxpar.data.tokenizers.encoders import Encoder, HuggingFace, Plain
from jaxpar.data.tokenizers.saved import saved
from jaxpar.data.tokens import KEPT, bpe_file, bpe_tokens, byte_tokens, load_bpe, train_bpe
from jaxpar.errors import JaxparError, refuse
from jaxpar.files import make_folder
from jaxpar.units import show_bytes, show_seconds

Say = Callable[[str], None]
EVERY = 5.0  # seconds between two lines of progress


def say_aside(text: str) -> None:
    """Prints a line beside the output."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Told:
    """Tells how far a long work on the text is; a short one is not mentioned.

    Attributes:
      what: Is done, in words.
      total: Bytes.
      say: Where to.
    """

    what: str
    total: int
    say: Say
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def __call__(self, more: int) -> None:
        """Counts bytes that were worked on."""
        self.done += more
        now = time.monotonic()
        if now - self.last < EVERY:
            return
        self.last, spent = now, now - self.began
        left = spent * (self.total - self.done) / max(self.done, 1)
        self.say(
            f"{self.what}: {show_bytes(self.done)} of {show_bytes(self.total)}, {show_bytes(self.done / spent)}/s, "
            f"{show_seconds(max(left, 0))} left"
        )


def pack(corpus: Corpus, spec: Data, folder: Path, say: Say = say_aside) -> tuple[Path, Packed]:
    """Returns the file of all tokens of a text and its list, checked to the last byte; packs it if it is not there.

    Args:
      corpus: The text.
      spec: The `[data]` table.
      folder: Where the file and the tokenizer lie.
      say: Where it is told what takes long, and what was found altered.

    Raises:
      JaxparError: If the text cannot be read or the file not be written; or if a file was altered, and packed again
        is not what was written.
    """
    make_folder(folder)
    kind, settings = f"tokens-{spec.tokenizer if spec.tokenizer in OURS else 'hf'}-{spec.tokens}-", settings_of(spec)
    mark = _salted(corpus.mark(), settings, 64)
    known = next((each.text for _, each in packed.listed(folder, f"{kind}*") if mark and each.mark == mark), None)
    digest = known or _salted(corpus.digest(Told("reading the text", corpus.bytes, say)), settings, 16)
    if spec.tokenizer not in OURS:
        saved(spec.tokenizer).copy(folder / KEPT)  # a run keeps its tokenizer
    file = folder / f"{kind}{digest}.bin"
    found, wrong = _found(file, spec, say)
    if not wrong:
        return file, found if found.mark == mark or not mark else _marked(file, found, mark)
    with _alone(folder, say) as alone:
        found, wrong = _found(file, spec, say)  # another may have packed it meanwhile
        if not wrong:
            return file, found
        if file.exists():
            say(f"{wrong}: the text is packed again")
        if alone:
            for part in folder.glob(f"{file.stem}.*part"):  # of a process that was killed
                part.unlink(missing_ok=True)
        return file, _packed(corpus, spec, file, mark, say, before=found)


def _salted(digest: str, settings: str, digits: int) -> str:
    """Returns a digest of the text together with what else decides its tokens; "" stays ""."""
    return hashlib.sha256(f"{digest}\n{settings}".encode()).hexdigest()[:digits] if digest and settings else digest


def _found(file: Path, spec: Data, say: Say) -> tuple[Any, str]:
    """Returns the list of a file of tokens, or None, and what is wrong: "" if all is as it was written."""
    try:
        found = packed.read_list(packed.list_of(file))
    except JaxparError as error:
        return None, error.problems[0].got
    if spec.tokenizer == "bpe" and packed.hash_of(bpe_file(file.parent, spec.vocab, found.text)) != found.tokenizer:
        return found, f"the tokenizer of {file.name} is altered"
    return found, packed.differs(file, found, Told("checking the packed tokens", found.size, say))


def _packed(corpus: Corpus, spec: Data, file: Path, mark: str, say: Say, *, before: Packed | None) -> Packed:
    """Packs a text, and returns the list; `before` is what an altered file had been."""
    began, total = time.monotonic(), corpus.bytes
    bpe, written = _bpe(corpus, spec, file, say, before=before) if spec.tokenizer == "bpe" else (None, "")
    if spec.is_marked:
        encoder: Encoder = (
            Plain(bpe, spec.tokens) if spec.tokenizer in OURS else HuggingFace(saved(spec.tokenizer), spec.end)
        )
        dtype = encoder.dtype
        chunks = from_place(corpus, encoder, Told("tokenizing", total, say))
        size, parts = journal.write_tokens(file, chunks, say)
    elif bpe is not None:
        dtype = np.dtype(np.uint16 if bpe.get_vocab_size() <= 2**16 else np.uint32)
        size, parts = packed.write_tokens(file, bpe_tokens(corpus, bpe, dtype, Told("tokenizing", total, say)))
    else:
        dtype = np.dtype(np.uint8)
        size, parts = packed.write_tokens(file, byte_tokens(corpus, Told("packing the text", total, say)))
    if before is not None and (before.size, before.parts) != (size, parts):
        raise refuse(
            f"{file} was altered, and packed again it is not what it was",
            rule="a run goes on with the tokens it began with",
            fix=f"the tokenizers package that run.json names, or rm {packed.list_of(file)} to begin with other tokens",
        )
    if not size:
        got = f"{len(corpus.files)} file{'s' * (len(corpus.files) > 1)} of data.path without a row: {corpus.files[0]}"
        raise refuse(got, rule="the files of data.path hold at least one row", fix="another data.path")
    for note in corpus.notes():
        say(note)
    made = Packed(
        text=file.stem.rpartition("-")[2], mark=mark, dtype=dtype.name, size=size, parts=parts, tokenizer=written,
        marked=spec.is_marked,
    )  # fmt: skip
    packed.write_list(file, made)
    if (spent := time.monotonic() - began) > EVERY:
        say(f"{show_bytes(total)} of text packed into {size // dtype.itemsize:,} tokens in {show_seconds(spent)}")
    return made


def _bpe(corpus: Corpus, spec: Data, file: Path, say: Say, *, before: Packed | None) -> tuple[Any, str]:
    """Returns the bpe of a text, trained if it is not there, and the hash of its file."""
    path = bpe_file(file.parent, spec.vocab, file.stem.rpartition("-")[2])
    if before is not None and packed.hash_of(path) != before.tokenizer:
        path.unlink(missing_ok=True)
    told = Told("training a bpe", corpus.bytes, say)
    bpe = load_bpe(path) if path.exists() else train_bpe(corpus, spec.vocab, path, told)
    return bpe, packed.hash_of(path)


def _marked(file: Path, found: Packed, mark: str) -> Packed:
    """Writes down that the text, read again, is the same: the next start need not read it."""
    made = replace(found, mark=mark)
    packed.write_list(file, made)
    return made


@contextmanager
def _alone(folder: Path, say: Say) -> Iterator[bool]:
    """Waits until no other process packs in a folder; false where the folder knows no locks, so that others may."""
    with (folder / "packing.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process, which packs the text into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            say(f"{folder} has no locks ({error.strerror}): each process packs the text for itself")
            yield False
            return
        yield True
