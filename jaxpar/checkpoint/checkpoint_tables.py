"""Tables of checkpoints: `jaxpar checkpoint ls`, `show`, `verify` and `export`. Takes no jax."""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import listing, manifest
from jaxpar.errors import JaxparError, escape_control, refuse
from jaxpar.files import check_local, partial_path
from jaxpar.units import show_bytes


def ls(where: Path) -> list[dict[str, Any]]:
    """Returns a row for each checkpoint of a run, oldest first.

    Its state is `whole` (names and sizes are as written; `verify` reads the content), `damaged`, `half-written`
    (or being written now), `half-deleted`, `set aside` or `gone behind` (by a rollback, or `train --from`).

    Raises:
      JaxparError: If there is no such folder.
    """
    folder = _check_folder(listing.checkpoint_folder(where))
    rows = [_row(folder / listing.folder_name(step)) for step in listing.steps(folder)]
    labels = {listing.WRITING: "half-written", listing.DELETED: "half-deleted"}
    labels |= {listing.DAMAGED: "set aside", listing.LEFT: "gone behind"}
    for path in sorted(folder.iterdir()):
        if (mark := next((mark for mark in labels if mark in path.name), None)) and path.name.split(".")[0].isdigit():
            rows.append(_empty(path, labels[mark]) | {"bytes": _bytes(path)})
    return rows


def verify(where: Path, step: int | None = None, *, all_of_them: bool = False) -> list[dict[str, Any]]:
    """Verifies the bytes of one checkpoint, or of every checkpoint of a run; returns step, path and errors of each.

    Raises:
      JaxparError: If there is none.
    """
    folder = listing.checkpoint_folder(where)
    paths = [folder / listing.folder_name(number) for number in listing.steps(folder)] if all_of_them else []
    return [
        {"step": _step(path), "path": str(path), "wrong": manifest.check(path)}
        for path in paths or [listing.find(where, step)]
    ]


def show(where: Path, step: int | None = None) -> dict[str, Any]:
    """Returns path, step, time, scores and arrays of a checkpoint.

    Raises:
      JaxparError: If there is none, or its MANIFEST cannot be read.
    """
    path = listing.find(where, step)
    contents = asdict(manifest.read(path))
    return {"path": str(path)} | {key: contents[key] for key in ("step", "written", "scores", "arrays")}


def export(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Copies a checkpoint, and verifies the original and the copy.

    Raises:
      JaxparError: If it is damaged, or the target is there already or cannot be written.
    """
    check_local(to, "--to")
    path = listing.find(where, step)
    if to.exists():
        raise refuse(f"--to {to} is there already", rule="--to is a folder that does not exist yet", fix=f"--to {to}-2")
    partial = partial_path(to)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        for source in (path, partial):
            if source == partial:
                shutil.copytree(path, partial, symlinks=True)
            if faults := manifest.check(source):
                rule = "an exported checkpoint has every file as its MANIFEST lists it"
                raise refuse(
                    f"{source}: {'; '.join(faults[:3])}",
                    rule=rule,
                    fix=f"--step of one that `jaxpar checkpoint ls {where}` lists as good",
                )
        partial.rename(to)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = getattr(error, "strerror", None) or "the disk is full, or a file cannot be read"
        raise refuse(
            f"--to {to}: {cause}",
            rule="--to is a folder that can be made, on a disk with enough free space",
            fix=f"--to a folder that you may write, on a disk with {show_bytes(_bytes(path))} of free space",
        ) from error
    return {"step": _step(path), "from": str(path), "to": str(to), "bytes": _bytes(to)}


def table(rows: list[dict[str, Any]]) -> str:
    """Formats the rows of `ls` as a table."""
    lines = [("step", "size", "written", "scores", "state")]
    for row in rows:
        time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written"])) if row["written"] else "-"
        scores = " ".join(f"{key} {value:.4f}" for key, value in row["scores"].items()) or "-"
        state = row["state"] + (f": {row['wrong'][0]}" if row["wrong"] else "")
        lines.append((str(row["step"]), show_bytes(row["bytes"]), time_text, scores, state))
    return align(lines, right=2)


def arrays_table(arrays: dict[str, Any]) -> str:
    """Formats the arrays of `show` as a table, with the total size."""
    lines = [
        (path, array["dtype"], str(list(array["shape"])), show_bytes(array["bytes"])) for path, array in arrays.items()
    ]
    total = sum(array["bytes"] for array in arrays.values())
    return align([*lines, (f"{len(arrays)} arrays", "", "", show_bytes(total))])


def align(lines: list[tuple[str, ...]], *, right: int = 0) -> str:
    """Aligns cells in columns; the first `right` columns are right-aligned."""
    lines = [tuple(escape_control(cell) for cell in line) for line in lines]
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    pad = [str.rjust if index < right else str.ljust for index in range(len(widths))]
    return "\n".join("  ".join(pad[i](cell, widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines)


def _row(path: Path) -> dict[str, Any]:
    faults = manifest.check(path, content=False)
    row = _empty(path, "damaged" if faults else "whole") | {"wrong": faults, "bytes": _bytes(path)}
    try:
        contents = manifest.read(path)
    except JaxparError:
        return row
    return row | {"written": contents.written, "scores": contents.scores, "bytes": contents.bytes}


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


def _check_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise refuse(f"{folder} is no folder", rule="RUN is the folder of a run", fix="jaxpar checkpoint ls runs/mine")
    return folder
