"""Writes files atomically, so that a crash cannot leave them half written, hashes them, and recognises a full disk.

TOML is parsed at bounded cost: Python's parser is quadratic in the number of words of a dotted key.
"""

import errno
import hashlib
import json
import os
import re
import stat
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse

FULL = (errno.ENOSPC, errno.EDQUOT)
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
LARGEST_TOML = 2**22  # characters of a file
DEEPEST_TOML = 20  # most words of a dotted key, and nested tables of a job file
# strings and comments, whose dots do not count
_TOML_TEXT = re.compile(r'"""(?s:.*?)"""|' r"'''(?s:.*?)'''|" r'"(?:\\.|[^"\\\n])*+"|' r"'[^'\n]*+'|#[^\n]*+")
_DOTTED_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{DEEPEST_TOML}}}")


def check_local(path: str | Path, name: str) -> None:
    """Refuses the address of an object store: as a file path, `gs://bucket/x` is a local folder `gs:`.

    Args:
      path: Path of a file or folder.
      name: Its name for the user, such as run.dir.

    Raises:
      JaxparError: If it has a scheme.
    """
    if address := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", str(path)):  # one slash: `Path` has dropped the second
        raise refuse(
            f"{name} = {str(path)!r:.200}",
            rule=f"jaxpar reads and writes folders of the file system, not {address[1]}://",
            fix="a bucket that is mounted (gcsfuse, mountpoint-s3, s3fs, blobfuse2), and its folder: /mnt/bucket/x",
        )


def expand_home(path: str | Path, name: str) -> Path:
    """Replaces a `~` at the beginning of a path by the user's home: no shell does so in a file, or after `run.dir=`.

    The text "./~x" is a folder of that name, and becomes its absolute path: `Path` drops the "./", and whoever expands
    the path again would take the name for a user's.

    Args:
      path: Path of a file or folder.
      name: Its name for the user, such as run.dir.

    Raises:
      JaxparError: If no user of this machine has the name after the `~`.
    """
    text = os.path.expanduser(path)
    if not str(text).startswith("~"):
        return Path(os.path.abspath(text) if str(Path(text)).startswith("~") else text)
    raise refuse(
        f"{name} = {str(path)!r:.200}: no such user, or one without a home",
        rule="~ is the home of the user, and ~name that of another user of this machine",
        fix=f"{name} = '{os.path.abspath(text):.200}', if a folder has that name",
    )


def check_plain(path: Path, *, rule: str, fix: str) -> None:
    """Refuses a pipe, a device or a socket, which would block when opened; a missing file passes.

    Args:
      path: Path of a file, or of a link to one.
      rule: Rule of the error: the purpose of the file.
      fix: How to go on.

    Raises:
      JaxparError: If it is neither a file nor a folder.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # the caller gets the error when it opens the file
        return
    if kind := _KINDS.get(stat.S_IFMT(mode)):
        raise refuse(f"{path} is {kind}, not a file", rule=rule, fix=fix)


def make_folder(folder: Path) -> None:
    """Makes a folder of a run.

    Raises:
      JaxparError: If the folder cannot be made, or is the address of an object store.
    """
    check_local(folder, "run folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise refuse(
            f"run folder {folder!s:.200}: {getattr(error, 'strerror', None) or error}",
            rule="a run writes into a folder of its own",
            fix="run.dir = 'runs/mine'",
        ) from error


def content_hash(content: bytes) -> str:
    """BLAKE2b of a file's bytes, in 64 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def write_json(path: Path, value: object) -> None:
    """Writes JSON atomically: a reader sees the old file or the new one."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def partial_path(path: Path) -> Path:
    """Returns the temporary path of a file before its rename to `path`, unique to this process.

    Two processes may write the same file at once, such as the tokenizer of data that two jobs share; with a common
    temporary path the second rename would fail. It contains the node's name because process ids repeat across nodes.
    """
    return path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}.part")


def write_text(path: Path, text: str) -> None:
    """Writes a text atomically: a reader sees the old file or the new one.

    Raises:
      JaxparError: If the file cannot be written, e.g. on a full disk or without permission.
    """
    part = partial_path(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise refuse(
            f"{path}: {error.strerror}",
            rule="a run writes into a folder of its own",
            fix="free disk space, or use another run.dir",
        ) from error


def write_page(path: str | Path, text: str, *, like: str = "page.html") -> None:
    """Writes a page or a picture to a path of the user's.

    Args:
      path: Path of the file.
      text: Text of the page.
      like: An example path, for the message.

    Raises:
      JaxparError: If the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        rule = "the path of a page is a file in a folder that exists"
        raise refuse(f"{path}: {error.strerror}", rule=rule, fix=like) from error


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flushes all files of a folder, and their names, to the disk (fsync)."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync(Path(path) / name)
        sync(Path(path))


def parse_toml(text: str) -> dict[str, Any]:
    """Parses a TOML text.

    Raises:
      ValueError: If it is not TOML, too long, or has a dotted key of too many words.
      RecursionError: If its brackets are nested too deeply.
    """
    if len(text) > LARGEST_TOML:
        raise ValueError(f"more than {LARGEST_TOML} characters")
    if match := _DOTTED_KEY.search(_TOML_TEXT.sub("_", text)):
        raise ValueError(f"a dotted key of more than {DEEPEST_TOML} words, which begins {match[0]:.40}")
    return tomllib.loads(text)
