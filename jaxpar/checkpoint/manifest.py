"""The manifest of a checkpoint: what it consists of, with a hash of every byte, so that damage is found.

    b7c9...e1                        BLAKE2b of all that follows
    {"format": 2, "step": 200, "arrays": {...}, "blocks": {"params/w": [{"process": 0, "at": 0, "hash": "...", ...}]}}

Format 2 lists the blocks of each array (see `arrays`). Format 1, of an older jaxpar, lists files that Orbax wrote, each
with its size and the hash of its content; such checkpoints are read, checked and adopted still.

A file that is altered, cut off, missing, added or renamed differs from the list; the list itself is covered by its
first line. It guards against accidents, not against an attacker, who could write another list; but no list leads out of
its folder.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

import pydantic

from jaxpar.checkpoint.arrays.blocks import FOLDER, SMALL, WORKERS, Block, altered, sizes, unfit
from jaxpar.errors import JaxparError, refuse
from jaxpar.files import sync, sync_tree

NAME = "MANIFEST"
PART = ".writing.list"  # of the name of a list that is to take the place of another
FORMAT, OLDER = 2, 1
LATEST = 253402300800.0  # seconds since 1970: the end of the year 9999


@dataclass(frozen=True)
class Array:
    """An array of a checkpoint: shape, dtype by its name, bytes of the whole of it."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class File:
    """A file of an older checkpoint: its size in bytes, and the hexadecimal BLAKE2b (32 bytes) of its content."""

    size: int
    hash: str


@dataclass(frozen=True, kw_only=True)
class SavedReplicas:
    """Replicas that made their steps apart.

    Attributes:
      count: How many; the first dim of `model_state`, and where they differ of `params` and `optimizer`.
      exchange: The name of the exchange by which they met.
      model: Which one model they trained: "mean" of theirs, a key of `exchange` that has its parameters, or "none";
        "" where their parameters do not differ.
    """

    count: int
    exchange: str
    model: str

    def __str__(self) -> str:
        which = f"the {self.model} of " if self.model else ""
        return f"{which}{self.count} replicas ({self.exchange})"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The list of a checkpoint.

    Attributes:
      step: Updates made when it was written.
      written: When, in seconds since 1970.
      scores: Metrics at that step: loss, eval_loss.
      arrays: Path such as `params/blocks/mlp/up` to array.
      blocks: Path of an array to the blocks that it consists of.
      files: In format 1: path within the checkpoint to file; all but the list itself.
      format: Of this list.
      replicas: That made their steps apart, if any.
    """

    step: int
    written: float
    scores: dict[str, float]
    arrays: dict[str, Array]
    blocks: dict[str, tuple[Block, ...]] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    format: int = FORMAT
    replicas: SavedReplicas | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Path to bytes of all files but the list itself."""
        return {name: file.size for name, file in self.files.items()} | sizes(self.blocks)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())


_READER = pydantic.TypeAdapter(Manifest)


def write(
    folder: Path, *, step: int, written: float, scores: Mapping[str, float], arrays: Mapping[str, Array],
    blocks: Mapping[str, Sequence[Block]], replicas: SavedReplicas | None = None,
) -> Manifest:  # fmt: skip
    """Makes a folder a checkpoint: lists the blocks that all processes wrote, and waits until the list is on the disk.

    Raises:
      JaxparError: If a file is not there: the processes do not share the folder.
    """
    made = Manifest(
        step=step, written=written, scores=dict(scores), arrays=dict(arrays),
        blocks={path: tuple(each) for path, each in blocks.items()}, replicas=replicas,
    )  # fmt: skip
    there = _walk(folder)
    if lost := [name for name, size in made.sizes.items() if there.get(name) != size]:
        raise refuse(
            f"{folder / lost[0]} has {there.get(lost[0]) or 0} bytes, {made.sizes[lost[0]]} were written",
            rule="all processes write their parts of a checkpoint into one folder",
            fix="run.dir on a file system that all machines share",
        )
    if there:
        sync(folder / FOLDER)  # the names in it; each process has waited for the content of its own file
    _list(folder / NAME, made)
    sync(folder)
    return made


def adopt(
    folder: Path, *, step: int, written: float, scores: Mapping[str, float], arrays: Mapping[str, Array]
) -> Manifest:
    """Makes a folder that Orbax wrote an older checkpoint: lists its files as they are."""
    made = Manifest(
        step=step, written=written, scores=dict(scores), arrays=dict(arrays), files=_hashed(folder), format=OLDER
    )
    sync_tree(folder)
    _list(folder / NAME, made)
    sync(folder)
    return made


def score(folder: Path, scores: Mapping[str, float]) -> None:
    """Adds later metrics to the scores of a checkpoint; a reader sees the old MANIFEST or the new one.

    Raises:
      JaxparError: If its list cannot be read.
    """
    made = read(folder)
    part = folder.with_name(folder.name + PART)  # beside it: within, what a kill leaves would not belong to it
    _list(part, replace(made, scores=made.scores | dict(scores)))
    part.replace(folder / NAME)
    sync(folder)


def _list(path: Path, made: Manifest) -> None:
    rest = json.dumps(asdict(made)).encode() + b"\n"
    path.write_bytes(_digest(rest).encode() + b"\n" + rest)
    sync(path)


def read(folder: Path) -> Manifest:
    """Returns the list of a checkpoint; its files are not looked at.

    Raises:
      JaxparError: If there is none, it is altered, it is of another step than its folder is called after, or a path in
        it leads out of the checkpoint.
    """
    rule = "a checkpoint has the MANIFEST that was written with it, unaltered"
    path = folder / NAME
    fix = f"another checkpoint, of those that `jaxpar checkpoint ls {folder.parent}` lists as good"
    if not path.is_file() or path.is_symlink():
        raise refuse(f"{path} is missing", rule=rule, fix=fix)
    try:
        first, _, rest = path.read_bytes().partition(b"\n")
        if first != _digest(rest).encode():
            raise refuse(f"{path} is altered", rule=rule, fix=fix)
        made = _READER.validate_json(rest)
    except pydantic.ValidationError as error:
        raise refuse(
            f"{path}: {error.errors()[0]['msg']:.100}",
            rule="a MANIFEST lists the arrays and blocks of a checkpoint",
            fix=fix,
        ) from error
    except OSError as error:
        raise refuse(f"{path}: {error.strerror}", rule=rule, fix=fix) from error
    if not 0 <= made.written < LATEST:
        raise refuse(
            f"{path}: written at {made.written}", rule="a MANIFEST lists the arrays and blocks of a checkpoint", fix=fix
        )
    # a copy or a rename of a folder does not make a checkpoint one of another step
    if made.step < 0 or (re.fullmatch("[0-9]{6,}", folder.name) and int(folder.name) != made.step):
        raise refuse(
            f"{path} is of step {made.step}", rule="the folder of a checkpoint is called after its step",
            fix=f"mv {folder} {folder.parent / f'{made.step:06d}'}, unless that is there" if made.step >= 0 else fix,
        )  # fmt: skip
    if made.format not in (FORMAT, OLDER):
        raise refuse(
            f"{path} has format {made.format}",
            rule=f"this jaxpar reads formats {OLDER} and {FORMAT}",
            fix="the jaxpar that wrote it (run.json names its version)",
        )
    if escaping := [name for name in made.files if not _stays(name)]:
        raise refuse(
            f"{path} names {escaping[0]!r}",
            rule="the files that a MANIFEST lists lie inside the folder of the checkpoint",
            fix=f"rm -r {folder}, which no run has written",
        )
    shapes = {name: (array.shape, array.bytes) for name, array in made.arrays.items()}
    if made.format == FORMAT and (wrong := "it lists files" if made.files else unfit(shapes, made.blocks)):
        raise refuse(f"{path}: {wrong}", rule="a MANIFEST lists the arrays and blocks of a checkpoint", fix=fix)
    return made


def check(folder: Path, *, content: bool = True) -> list[str]:
    """Returns the problems of a checkpoint, file by file; empty if every byte is as it was written.

    Args:
      folder: The checkpoint.
      content: Whether files are read to the last byte; otherwise names and sizes are compared, which is quick.
    """
    try:
        made = read(folder)
        there = _walk(folder)
    except JaxparError as error:
        return [problem.got.removeprefix(f"{folder}{os.sep}") for problem in error.problems]
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    listed = made.sizes
    wrong = [f"{name} is missing" for name in listed if name not in there]
    wrong += [f"{name} does not belong to it" for name in there if name not in listed]
    kept = [name for name in listed if name in there]
    wrong += [f"{name} is no plain file" for name in kept if there[name] is None]
    sized = [name for name in kept if there[name] is not None]
    wrong += [
        f"{name} has {there[name]} bytes, {listed[name]} were written" for name in sized if there[name] != listed[name]
    ]
    if content:
        same = {name: made.files[name] for name in sized if there[name] == listed[name] and name in made.files}
        said = _each(lambda name: _differs(folder, name, made.files), same)
        wrong += [f"{name} {each}" for name, each in zip(same, said, strict=True) if each]
        wrong += altered(folder, made.blocks, [name for name in sized if there[name] == listed[name]])
    return wrong


def _differs(folder: Path, name: str, listed: Mapping[str, File]) -> str:
    try:
        return "" if _digest_of(folder / name) == listed[name].hash else "is altered"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _hashed(folder: Path) -> dict[str, File]:
    there = {name: File(size, "") for name, size in sorted(_walk(folder).items()) if size is not None}
    hashes = _each(lambda name: _digest_of(folder / name), there)
    return {name: File(there[name].size, digest) for name, digest in zip(there, hashes, strict=True)}


def _each(function: Callable[[str], str], files: Mapping[str, File]) -> list[str]:
    """Returns the result of a function for each file; large files are read in parallel."""
    if sum(file.size for file in files.values()) < SMALL:
        return [function(name) for name in files]
    with ThreadPoolExecutor(WORKERS) as workers:
        return list(workers.map(function, files))


def _walk(folder: Path) -> dict[str, int | None]:
    """Returns path to size of everything in a checkpoint except its MANIFEST; None for what is not a plain file."""
    found: dict[str, int | None] = {}
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in (*names, *links):
            path = Path(root) / name
            status = path.lstat()
            found[path.relative_to(folder).as_posix()] = status.st_size if stat.S_ISREG(status.st_mode) else None
    found.pop(NAME, None)
    return found


def _stays(name: str) -> bool:
    """Returns whether a path leads to a file within the folder it starts from."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not set(name) & {"\\", "\0"}


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def _digest_of(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
