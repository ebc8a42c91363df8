"""Tokenizes a text once: of the processes that share a folder, one tokenizes it, and the others wait.

is the file there, with every byte as written? ──yes──► train
          │ no: take the lock, on which the others wait
          └─► digest ─► tokenizer ─► tokens, in parallel and in order ─► on disk ─► manifest
"""

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data import packed
from jaxpar.data.corpus import Corpus
from jaxpar.data.documents.plain_text import Place
from jaxpar.data.packed import Packed
from jaxpar.data.spec import OURS, Data
from jaxpar.data.tokenizers.encoders import (
    BuiltinEncoder,
    Encoder,
    HuggingFaceEncoder,
    document_encoder,
    token_settings,
)
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.data.tokens import TOKENIZER_FOLDER, bpe_file, bpe_tokens, byte_tokens, load_bpe, train_bpe
from jaxpar.errors import JaxparError, refuse
from jaxpar.files import make_folder, sync, write_text
from jaxpar.units import show_bytes, show_seconds

# Writes tokens resumably: after a kill the next process continues at the exact token.
#
#     tokens-hf-32000-0f3a.begun       the tokens so far
#     tokens-hf-32000-0f3a.progress    b7c9...e1: BLAKE2b of the next line
#                                      {"place": [0, 1048576, 0], "size": 524288, "parts": ["9d..."]}
#
# Every `SYNC_EVERY` seconds the tokens are synced, and then the place in the documents that they reach. A process that
# resumes verifies the hashes, truncates the tokens after that place, and reads the documents from it on.

SYNC_EVERY = 10.0  # seconds between two records of the place
Chunks = Callable[[Place], Iterable[tuple[np.ndarray, Place]]]


def write_tokens(file: Path, chunks: Chunks, say: Callable[[str], None]) -> tuple[int, tuple[str, ...]]:
    """Writes a file, resuming what an earlier process wrote; returns its size and the hashes of its parts.

    Args:
      file: The file; until it is complete its content is in a file with the suffix .begun.
      chunks: Maps a place to an iterable of the tokens from it on, each array with the place after it.
      say: Takes a message if the write is resumed.

    Raises:
      JaxparError: If it cannot be written.
    """
    partial_file, notes = file.with_suffix(".begun"), file.with_suffix(".progress")
    place, size, parts = _resume_point(partial_file, notes)
    if size:
        say(f"packing goes on after {size:,} bytes of tokens that an earlier start has packed")
    try:
        with partial_file.open("r+b" if size else "w+b", buffering=0) as out:
            out.truncate(size)
            out.seek(len(parts) * packed.PART)
            writer, noted_at = packed.HashingWriter(out, parts, out.read()), time.monotonic()
            for chunk, place_after in chunks(place):
                writer.write(chunk)
                if time.monotonic() - noted_at >= SYNC_EVERY:
                    os.fsync(out.fileno())
                    _write_progress(notes, place_after, writer)
                    noted_at = time.monotonic()
            os.fsync(out.fileno())
        partial_file.replace(file)
        notes.unlink(missing_ok=True)
        sync(file.parent)
    except OSError as error:
        raise packed.write_error(partial_file, error) from error
    return writer.size, writer.parts


def _write_progress(notes: Path, place: Place, hashed: packed.HashingWriter) -> None:
    line = json.dumps({"place": place, "size": hashed.size, "parts": hashed.parts})
    write_text(notes, f"{hashlib.blake2b(line.encode()).hexdigest()}\n{line}\n")
    sync(notes)


def _resume_point(begun: Path, notes: Path) -> tuple[Place, int, tuple[str, ...]]:
    """Returns the place to resume at, the number of verified bytes, and the hashes of their complete parts."""
    start = Place(), 0, ()
    try:
        first, _, line = notes.read_bytes().partition(b"\n")
        if first != hashlib.blake2b(line.strip()).hexdigest().encode():
            return start
        record = json.loads(line)
        if begun.stat().st_size < record["size"]:
            return start
        os.truncate(begun, record["size"])
    except (OSError, ValueError):  # no record, or one that was truncated by a kill
        return start
    parts = tuple(record["parts"])
    manifest = packed.Packed(text="", mark="", dtype="", size=record["size"], parts=parts)
    if packed.find_damage(begun, manifest):  # bytes that did not reach the disk before the machine went down
        return start
    complete = record["size"] // packed.PART
    return Place(*record["place"]), record["size"], parts[:complete]


Say = Callable[[str], None]
EVERY = 5.0  # seconds between two lines of progress


def print_to_stderr(text: str) -> None:
    """Prints a line to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class PackingProgress:
    """Reports the progress of a pass over the text every `EVERY` seconds, so not at all for a short one.

    Attributes:
      label: Name of the work.
      total: Bytes of the text.
      say: Takes a line of progress.
    """

    label: str
    total: int
    say: Say
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def __call__(self, more: int) -> None:
        """Adds finished bytes, and reports if it is time."""
        self.done += more
        time_now = time.monotonic()
        if time_now - self.last < EVERY:
            return
        self.last, elapsed = time_now, time_now - self.began
        remaining = elapsed * (self.total - self.done) / max(self.done, 1)
        self.say(
            f"{self.label}: {show_bytes(self.done)} of {show_bytes(self.total)}, {show_bytes(self.done / elapsed)}/s, "
            f"{show_seconds(max(remaining, 0))} left"
        )


def pack(corpus: Corpus, spec: Data, folder: Path, say: Say = print_to_stderr) -> tuple[Path, Packed]:
    """Returns the file of a text's tokens and its manifest, checked to the last byte; packs the text if needed.

    Args:
      corpus: The text.
      spec: The `[data]` table.
      folder: Folder of the file and the tokenizer.
      say: Takes lines about progress and altered files.

    Raises:
      JaxparError: If the text cannot be read or the file cannot be written; or if a file was altered, and packing the
        text again results in other tokens.
    """
    make_folder(folder)
    kind, settings = f"tokens-{spec.tokenizer if spec.tokenizer in OURS else 'hf'}-{spec.tokens}-", token_settings(spec)
    mark = _salt(corpus.mark(), settings, 64)
    old_digest = next(
        (item.text for _, item in packed.find_packed(folder, f"{kind}*") if mark and item.mark == mark), None
    )
    digest = old_digest or _salt(corpus.digest(PackingProgress("reading the text", corpus.bytes, say)), settings, 16)
    if spec.tokenizer not in OURS:
        # so that the run does not depend on the model's folder
        read_tokenizer(spec.tokenizer).copy(folder / TOKENIZER_FOLDER)
    file = folder / f"{kind}{digest}.bin"
    manifest, problem = _check_packed(file, spec, say)
    if not problem:
        return file, manifest if manifest.mark == mark or not mark else _update_mark(file, manifest, mark)
    with folder_lock(folder, say) as is_locked:
        manifest, problem = _check_packed(file, spec, say)  # another process may have packed it meanwhile
        if not problem:
            return file, manifest
        if file.exists():
            say(f"{problem}: the text is packed again")
        if is_locked:
            for leftover in folder.glob(f"{file.stem}.*part"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
        return file, _pack_text(corpus, spec, file, mark, say, before=manifest)


def _salt(digest: str, settings: str, digits: int) -> str:
    """Returns a digest of a text's digest and the settings that determine its tokens; "" for ""."""
    return hashlib.sha256(f"{digest}\n{settings}".encode()).hexdigest()[:digits] if digest and settings else digest


def _check_packed(file: Path, spec: Data, say: Say) -> tuple[Any, str]:
    """Checks a file of tokens; returns its manifest or None, and a description of the damage, "" if there is none."""
    try:
        entry = packed.read_manifest(packed.manifest_path(file))
    except JaxparError as error:
        return None, error.problems[0].got
    if spec.tokenizer == "bpe" and packed.hash_file(bpe_file(file.parent, spec.vocab, entry.text)) != entry.tokenizer:
        return entry, f"the tokenizer of {file.name} is altered"
    return entry, packed.find_damage(file, entry, PackingProgress("checking the packed tokens", entry.size, say))


def _pack_text(corpus: Corpus, spec: Data, file: Path, mark: str, say: Say, *, before: Packed | None) -> Packed:
    """Packs a text and returns the manifest; `before` is the manifest of the altered file, which must be reproduced."""
    start, total = time.monotonic(), corpus.bytes
    bpe, bpe_hash = _bpe(corpus, spec, file, say, before=before) if spec.tokenizer == "bpe" else (None, "")
    if spec.is_marked:
        encoder: Encoder = (
            BuiltinEncoder(bpe, spec.tokens)
            if spec.tokenizer in OURS
            else HuggingFaceEncoder(read_tokenizer(spec.tokenizer), spec.end)
        )
        dtype = encoder.dtype
        chunks = document_encoder(corpus, encoder, PackingProgress("tokenizing", total, say))
        size, parts = write_tokens(file, chunks, say)
    elif bpe is not None:
        dtype = np.dtype(np.uint16 if bpe.get_vocab_size() <= 2**16 else np.uint32)
        size, parts = packed.write_tokens(
            file, bpe_tokens(corpus, bpe, dtype, PackingProgress("tokenizing", total, say))
        )
    else:
        dtype = np.dtype(np.uint8)
        size, parts = packed.write_tokens(file, byte_tokens(corpus, PackingProgress("packing the text", total, say)))
    if before is not None and (before.size, before.parts) != (size, parts):
        raise refuse(
            f"{file} was altered, and packing the text again gives other tokens",
            rule="a run continues with the tokens that it began with",
            fix=f"the tokenizers package that run.json names, or rm {packed.manifest_path(file)} to begin with "
            f"other tokens",
        )
    if not size:
        got = f"{len(corpus.files)} file{'s' * (len(corpus.files) > 1)} of data.path without a row: {corpus.files[0]}"
        raise refuse(got, rule="the files of data.path hold at least one row", fix="another data.path")
    for note in corpus.notes():
        say(note)
    manifest = Packed(
        text=file.stem.rpartition("-")[2], mark=mark, dtype=dtype.name, size=size, parts=parts, tokenizer=bpe_hash,
        marked=spec.is_marked,
    )  # fmt: skip
    packed.write_manifest(file, manifest)
    if (elapsed := time.monotonic() - start) > EVERY:
        say(f"{show_bytes(total)} of text packed into {size // dtype.itemsize:,} tokens in {show_seconds(elapsed)}")
    return manifest


def _bpe(corpus: Corpus, spec: Data, file: Path, say: Say, *, before: Packed | None) -> tuple[Any, str]:
    """Returns the BPE of a text, trained if there is none yet, and the hash of its file."""
    path = bpe_file(file.parent, spec.vocab, file.stem.rpartition("-")[2])
    if before is not None and packed.hash_file(path) != before.tokenizer:
        path.unlink(missing_ok=True)
    progress = PackingProgress("training a bpe", corpus.bytes, say)
    bpe = load_bpe(path) if path.exists() else train_bpe(corpus, spec.vocab, path, progress)
    return bpe, packed.hash_file(path)


def _update_mark(file: Path, found: Packed, mark: str) -> Packed:
    """Records the new mark of an unchanged text, so that the next start need not read the text."""
    manifest = replace(found, mark=mark)
    packed.write_manifest(file, manifest)
    return manifest


@contextmanager
def folder_lock(folder: Path, say: Say) -> Iterator[bool]:
    """Takes the lock of a folder; yields False if its file system has no locks (other processes may then pack too)."""
    with (folder / "packing.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process, which packs the data into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            say(f"{folder} has no locks ({error.strerror}): each process packs the data for itself")
            yield False
            return
        yield True
