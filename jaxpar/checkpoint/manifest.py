"""The manifest of a checkpoint: its arrays, blocks and files with their hashes, so that damage is detected.

    b7c9...e1                        BLAKE2b of the rest of this file
    {"format": 2, "step": 200, "arrays": {...}, "blocks": {"params/w": [{"process": 0, "at": 0, "hash": "...", ...}]}}

It lists the blocks of each array; see `arrays`.

A file that is altered, truncated, missing, added or renamed differs from the manifest, and the manifest's first line is
its own hash. It guards against accidents, not against an attacker, who could write another manifest; but no manifest
refers to files outside of its folder.
"""

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pydantic

from jaxpar.checkpoint.blocks import FOLDER, SavedBlock, find_altered_files, find_misfit, sizes
from jaxpar.errors import JaxparError, refuse
from jaxpar.files import content_hash, sync

NAME = "MANIFEST"
PART = ".writing.list"  # suffix of a manifest that replaces another
FORMAT = 2
LATEST = 253402300800.0  # seconds since 1970: the end of the year 9999


@dataclass(frozen=True)
class SavedArray:
    """An array of a checkpoint: shape, name of its dtype, total bytes."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SavedReplicas:
    """The replicas in a checkpoint, which train partly or wholly on their own.

    Attributes:
      count: Number of replicas: the first dim of `model_state`, and if they differ of `params` and `optimizer`.
      exchange: The name of their exchange.
      model: How the replicas define one global model: "mean" of their parameters; the name of an array of the
        exchange, which has its parameters; "none" if there is no such model; "" if all replicas are equal.
    """

    count: int
    exchange: str
    model: str

    def __str__(self) -> str:
        which = f"the {self.model} of " if self.model else ""
        return f"{which}{self.count} replicas ({self.exchange})"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
      step: Number of updates when it was written.
      written: Time of writing, in seconds since 1970.
      scores: Metrics at that step: loss, eval_loss.
      arrays: Path such as `params/blocks/mlp/up` to array.
      blocks: Path of an array to its blocks.
      format: Version of the manifest's format.
      replicas: The replicas, if they made separate steps.
    """

    step: int
    written: float
    scores: dict[str, float]
    arrays: dict[str, SavedArray]
    blocks: dict[str, tuple[SavedBlock, ...]] = field(default_factory=dict)
    format: int = FORMAT
    replicas: SavedReplicas | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Path to bytes of all files except for the manifest."""
        return sizes(self.blocks)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())


_READER = pydantic.TypeAdapter(Manifest)


def write(
    folder: Path, *, step: int, written: float, scores: Mapping[str, float], arrays: Mapping[str, SavedArray],
    blocks: Mapping[str, Sequence[SavedBlock]], replicas: SavedReplicas | None = None,
) -> Manifest:  # fmt: skip
    """Writes the MANIFEST of the blocks that all processes wrote, with fsync, which makes the folder a checkpoint.

    Raises:
      JaxparError: If a file is missing or has another size: the processes do not share the folder.
    """
    manifest = Manifest(
        step=step, written=written, scores=dict(scores), arrays=dict(arrays),
        blocks={path: tuple(array_blocks) for path, array_blocks in blocks.items()}, replicas=replicas,
    )  # fmt: skip
    files = _walk(folder)
    if missing := [name for name, size in manifest.sizes.items() if files.get(name) != size]:
        raise refuse(
            f"{folder / missing[0]} has {files.get(missing[0]) or 0} bytes, {manifest.sizes[missing[0]]} were written",
            rule="all processes write their parts of a checkpoint into one folder",
            fix="run.dir on a file system that all machines share",
        )
    if files:
        sync(folder / FOLDER)  # the folder's entries; each process has synced the content of its own file
    _write_manifest(folder / NAME, manifest)
    sync(folder)
    return manifest


def score(folder: Path, scores: Mapping[str, float]) -> None:
    """Adds metrics to the scores of a checkpoint; the MANIFEST is replaced atomically.

    Raises:
      JaxparError: If the MANIFEST cannot be read.
    """
    contents = read(folder)
    # not in the folder: a file left there by a kill would count as damage
    partial = folder.with_name(folder.name + PART)
    _write_manifest(partial, replace(contents, scores=contents.scores | dict(scores)))
    partial.replace(folder / NAME)
    sync(folder)


def _write_manifest(path: Path, contents: Manifest) -> None:
    content = json.dumps(asdict(contents)).encode() + b"\n"
    path.write_bytes(content_hash(content).encode() + b"\n" + content)
    sync(path)


def read(folder: Path) -> Manifest:
    """Reads the MANIFEST of a checkpoint; its files are not checked.

    Raises:
      JaxparError: If it is missing or altered, has another step than the name of its folder, or a path in it leads out
        of the checkpoint.
    """
    rule = "a checkpoint has the MANIFEST that was written with it, unaltered"
    path = folder / NAME
    fix = f"another checkpoint, of those that `jaxpar checkpoint ls {folder.parent}` lists as good"
    if not path.is_file() or path.is_symlink():
        raise refuse(f"{path} is missing", rule=rule, fix=fix)
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest != content_hash(content).encode():
            raise refuse(f"{path} is altered", rule=rule, fix=fix)
        data = _READER.validate_json(content)
    except pydantic.ValidationError as error:
        raise refuse(
            f"{path}: {error.errors()[0]['msg']:.100}",
            rule="a MANIFEST lists the arrays and blocks of a checkpoint",
            fix=fix,
        ) from error
    except OSError as error:
        raise refuse(f"{path}: {error.strerror}", rule=rule, fix=fix) from error
    if not 0 <= data.written < LATEST:
        raise refuse(
            f"{path}: written at {data.written}", rule="a MANIFEST lists the arrays and blocks of a checkpoint", fix=fix
        )
    # a copied or renamed folder is no checkpoint of another step
    if data.step < 0 or (re.fullmatch("[0-9]{6,}", folder.name) and int(folder.name) != data.step):
        raise refuse(
            f"{path} is of step {data.step}", rule="the folder of a checkpoint is called after its step",
            fix=f"mv {folder} {folder.parent / f'{data.step:06d}'}, unless that is there" if data.step >= 0 else fix,
        )  # fmt: skip
    if data.format != FORMAT:
        raise refuse(
            f"{path} has format {data.format}",
            rule=f"this jaxpar reads format {FORMAT}",
            fix="the jaxpar that wrote it (run.json names its version)",
        )
    shapes = {name: (array.shape, array.bytes) for name, array in data.arrays.items()}
    if fault := find_misfit(shapes, data.blocks):
        raise refuse(f"{path}: {fault}", rule="a MANIFEST lists the arrays and blocks of a checkpoint", fix=fix)
    return data


def check(folder: Path, *, content: bool = True) -> list[str]:
    """Verifies a checkpoint; returns a line per fault, none if every byte is as written.

    Args:
      folder: The checkpoint.
      content: Whether to hash every byte; otherwise only names and sizes are compared, which is quick.
    """
    try:
        data = read(folder)
        actual = _walk(folder)
    except JaxparError as error:
        return [problem.got.removeprefix(f"{folder}{os.sep}") for problem in error.problems]
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    expected = data.sizes
    faults = [f"{name} is missing" for name in expected if name not in actual]
    faults += [f"{name} does not belong to it" for name in actual if name not in expected]
    names = [name for name in expected if name in actual]
    faults += [f"{name} is no plain file" for name in names if actual[name] is None]
    files = [name for name in names if actual[name] is not None]
    faults += [
        f"{name} has {actual[name]} bytes, {expected[name]} were written"
        for name in files
        if actual[name] != expected[name]
    ]
    if content:
        faults += find_altered_files(folder, data.blocks, [name for name in files if actual[name] == expected[name]])
    return faults


def _walk(folder: Path) -> dict[str, int | None]:
    """Maps the path of each file of a checkpoint except its MANIFEST to its size; a link has the size None."""
    entries: dict[str, int | None] = {}
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in (*names, *links):
            path = Path(root) / name
            status = path.lstat()
            entries[path.relative_to(folder).as_posix()] = status.st_size if stat.S_ISREG(status.st_mode) else None
    entries.pop(NAME, None)
    return entries
