"""Tables of checkpoints: `jaxpar checkpoint ls`, `show`, `verify` and `export`. Takes no jax."""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import listing, manifest
from jaxpar.errors import JaxparError, plain, refuse
from jaxpar.files import check_local, partial_path
from jaxpar.units import show_bytes


def ls(where: Path) -> list[dict[str, Any]]:
    """Returns a row for each checkpoint of a run, oldest first.

    The state of one is `whole` (names and sizes are as written; `verify` reads the content), `damaged`, `older` (no
    list: an older jaxpar wrote it), `half-written` (or being written now), `set aside` or
    `gone behind` (by a rollback, or `train --from`).

    Raises:
      JaxparError: If there is no such folder.
    """
    folder = _there(listing.shelf_of(where))
    rows = [_row(folder / listing.name_of(step)) for step in listing.steps(folder)]
    apart = {listing.WRITING: "half-written", listing.DELETED: "half-deleted"}
    apart |= {listing.DAMAGED: "set aside", listing.LEFT: "gone behind"}
    for path in sorted(folder.iterdir()):
        if (mark := next((mark for mark in apart if mark in path.name), None)) and path.name.split(".")[0].isdigit():
            rows.append(_empty(path, apart[mark]) | {"bytes": _bytes(path)})
    return rows


def verify(where: Path, step: int | None = None, *, all_of_them: bool = False) -> list[dict[str, Any]]:
    """Returns step, path and everything that is wrong, for one checkpoint or all of a run; every byte is read.

    Raises:
      JaxparError: If there is none.
    """
    folder = listing.shelf_of(where)
    paths = [folder / listing.name_of(each) for each in listing.steps(folder)] if all_of_them else []
    return [
        {"step": _step(path), "path": str(path), "wrong": ["an older jaxpar wrote it: no MANIFEST"]}
        if listing.is_older(path)
        else {"step": _step(path), "path": str(path), "wrong": manifest.check(path)}
        for path in paths or [listing.find(where, step)]
    ]


def show(where: Path, step: int | None = None) -> dict[str, Any]:
    """Returns the contents of a checkpoint, array by array.

    Raises:
      JaxparError: If there is none, or its list cannot be read.
    """
    path = listing.find(where, step)
    if listing.is_older(path):
        raise listing.refuse_older(path)
    made = asdict(manifest.read(path))
    return {"path": str(path)} | {key: made[key] for key in ("step", "written", "scores", "arrays")}


def export(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Copies a checkpoint with its list, and verifies the copy.

    Raises:
      JaxparError: If it is damaged, or the target is there already or cannot be written.
    """
    check_local(to, "--to")
    path = listing.find(where, step)
    if listing.is_older(path):
        raise listing.refuse_older(path)
    if to.exists():
        raise refuse(f"--to {to} is there already", rule="--to is a folder that does not exist yet", fix=f"--to {to}-2")
    part = partial_path(to)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        for source in (path, part):
            if source == part:
                shutil.copytree(path, part, symlinks=True)
            if wrong := manifest.check(source):
                rule = "an exported checkpoint has every file as its MANIFEST lists it"
                raise refuse(
                    f"{source}: {'; '.join(wrong[:3])}",
                    rule=rule,
                    fix=f"--step of one that `jaxpar checkpoint ls {where}` lists as good",
                )
        part.rename(to)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(part, ignore_errors=True)
        said = getattr(error, "strerror", None) or "the disk is full, or a file cannot be read"
        raise refuse(
            f"--to {to}: {said}",
            rule="--to is a folder that can be made, on a disk with enough free space",
            fix=f"--to a folder that you may write, on a disk with {show_bytes(_bytes(path))} of free space",
        ) from error
    return {"step": _step(path), "from": str(path), "to": str(to), "bytes": _bytes(to)}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows of `ls` as text."""
    lines = [("step", "size", "written", "scores", "state")]
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written"])) if row["written"] else "-"
        scores = " ".join(f"{key} {value:.4f}" for key, value in row["scores"].items()) or "-"
        state = row["state"] + (f": {row['wrong'][0]}" if row["wrong"] else "")
        lines.append((str(row["step"]), show_bytes(row["bytes"]), when, scores, state))
    return aligned(lines, right=2)


def arrays_table(arrays: dict[str, Any]) -> str:
    """Returns the arrays of `show` as text, with their sum."""
    lines = [
        (path, array["dtype"], str(list(array["shape"])), show_bytes(array["bytes"])) for path, array in arrays.items()
    ]
    total = sum(array["bytes"] for array in arrays.values())
    return aligned([*lines, (f"{len(arrays)} arrays", "", "", show_bytes(total))])


def aligned(lines: list[tuple[str, ...]], *, right: int = 0) -> str:
    """Returns lines in columns, the first few of them aligned to the right."""
    lines = [tuple(plain(cell) for cell in line) for line in lines]
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    pad = [str.rjust if index < right else str.ljust for index in range(len(widths))]
    return "\n".join("  ".join(pad[i](cell, widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines)


def _row(path: Path) -> dict[str, Any]:
    if listing.is_older(path):
        return _empty(path, "older") | {"bytes": _bytes(path)}
    wrong = manifest.check(path, content=False)
    row = _empty(path, "damaged" if wrong else "whole") | {"wrong": wrong, "bytes": _bytes(path)}
    try:
        made = manifest.read(path)
    except JaxparError:
        return row
    return row | {"written": made.written, "scores": made.scores, "bytes": made.bytes}


def _empty(path: Path, state: str) -> dict[str, Any]:
    return {
        "step": _step(path),
        "path": str(path),
        "bytes": 0,
        "written": None,
        "scores": {},
        "state": state,
        "wrong": [],
    }


def _step(path: Path) -> int | str:
    name = path.name.split(".")[0]
    return int(name) if name.isdecimal() else path.name


def _bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def _there(folder: Path) -> Path:
    if not folder.is_dir():
        raise refuse(f"{folder} is no folder", rule="RUN is the folder of a run", fix="jaxpar checkpoint ls runs/mine")
    return folder
