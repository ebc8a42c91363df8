"""Run folders and files in buckets: `gs://bucket/run`, `s3://bucket/run`, and every other scheme of fsspec.

    RUN on this machine's disk                      the bucket
    checkpoints/000040/arrays/00000   ──────────►   the same name, when the checkpoint is complete
    checkpoints/000040/MANIFEST       ──────────►   after all of its arrays: without one it is no checkpoint
    metrics.jsonl, run.json, ...      ──────────►   with each checkpoint, and at the end
    all files                         ◄──────────   when the run starts, unless the copy has a newer checkpoint

A run writes to a local folder under the user's cache, like any other run, and so has a file system for renames, locks
and memory maps. A single process writes a bucket: several would need a shared folder.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import fsspec

from jaxpar.errors import JaxparError, describe_exception, refuse, suggest
from jaxpar.files import expand_home

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash: `Path` drops the second
MANIFEST = "MANIFEST"
READ_ONLY = "read"  # cache folder of read-only copies
DISK = ("file", "local")  # the schemes of a disk, which may be mounted from elsewhere
# not copied: packed tokens, which are rebuilt; locks and heartbeats, which belong to one machine; partial files
LOCAL = re.compile(r"(data/.*\.bin|.*\.(lock|part)|lock|processes/.*|checkpoints/(?!\d+/).*)")


def is_address(path: str | Path) -> bool:
    """Whether a path is the address of an object store: a scheme of more than one letter, and a slash."""
    return SCHEME.match(str(path)) is not None


def check_address(path: str | Path, name: str) -> None:
    """Checks that the package for an address's scheme is installed.

    Args:
      path: A path, or an address.
      name: Its name for the user, such as run.dir.

    Raises:
      JaxparError: If it is an address whose scheme no installed package reads.
    """
    if not (match := SCHEME.match(str(path))):
        return
    scheme = match[1]
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        schemes = fsspec.available_protocols()
        install = f"pip install {packages}" if (packages := _packages(str(error))) else "the packages that it needs"
        raise refuse(
            f"{name} = {str(path)!r:.200}: {error}",
            rule="an address has a scheme of fsspec, whose package is installed",
            fix=f"{install}; or a bucket that is mounted, and its folder"
            if scheme in schemes
            else f"{suggest(scheme, schemes, otherwise='gs://, s3://, az://')}; or a folder",
        ) from error


def _packages(text: str) -> str:
    """Returns the packages that fsspec's message about a scheme names, separated by spaces; "" if it names none."""
    if match := re.search(r"[Ii]nstall (?:the )?([a-z][\w-]+)|requires ([a-z][\w-]+) to be|'(huggingface_hub)\.", text):
        return next(filter(None, match.groups()))
    return " ".join(re.findall(r'"([a-z][\w-]+)"', text))


def local_folder(path: str | Path, *, kind: str = "buckets") -> Path:
    """Returns a run's folder on the local disk: the path itself, `~` expanded, or the copy of an address.

    Args:
      path: A folder, or an address.
      kind: The folder of the cache: read-only copies are separate from those of runs, which may be writing.

    Raises:
      JaxparError: If the path begins with the home of an unknown user.
    """
    if not is_address(path):
        return expand_home(path, "folder")
    scheme, _, folder = str(path).partition(":")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "jaxpar" / kind / scheme / folder.strip("/")


class Bucket:
    """A folder in an object store, and its copy on the local disk.

    Args:
      address: Address of the folder.
      say: Prints a line for the user.
      kind: As for `local_folder`.

    Attributes:
      local: Path of the copy.
    """

    def __init__(self, address: str | Path, say: Callable[[str], None] = print, *, kind: str = "buckets"):
        check_address(address, "address")
        self.address = _whole(address)
        self.local, self._say = local_folder(self.address, kind=kind), say
        self._lock, self._failed = threading.Lock(), ""
        self._pushed: dict[str, tuple[int, int]] = {}
        with _Talking(self.address, "opened"):
            self._files, root = _file_system(self.address)
        self._root = root.rstrip("/")

    def pull(self) -> None:
        """Makes the copy equal to the bucket: complete checkpoints, and all other files.

        A copy with a newer checkpoint than the bucket's is left as it is: the bucket was unreachable or the run was
        killed before the upload, and the next push uploads it.

        Raises:
          JaxparError: If the bucket cannot be read.
        """
        with _Talking(self.address, "read"):
            self._files.invalidate_cache()
            sizes = {name: info["size"] for name, info in self._remote() if not LOCAL.fullmatch(name)}
        complete = {folder for name in sizes if (folder := _checkpoint(name)) and f"{folder}/{MANIFEST}" in sizes}
        newest, newest_remote = max(_complete_checkpoints(self.local), default=""), max(complete, default="")
        if newest > newest_remote:
            self._say(f"{self.local} has {newest}, {self.address} {newest_remote or 'no checkpoint'}: on from the copy")
            return
        files = {name: size for name, size in sizes.items() if not (folder := _checkpoint(name)) or folder in complete}
        for name in _copied_files(self.local).keys() - files.keys():
            (self.local / name).unlink(missing_ok=True)
        for folder in (self.local / "checkpoints").glob("*"):
            if f"checkpoints/{folder.name}" not in complete:
                shutil.rmtree(folder, ignore_errors=True)
        unchanged = {folder for folder in complete if self._is_same(f"{folder}/{MANIFEST}")}
        with _Talking(self.address, "read"):
            for name, size in sorted(files.items()):
                path = self.local / name
                if _checkpoint(name) in unchanged and path.is_file() and path.stat().st_size == size:
                    continue  # its MANIFEST, which is the bucket's, has the hash of every byte
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}", str(path))
        self._pushed = _copied_files(self.local)

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Pulls at the start, and pushes at the end, also after an error.

        Raises:
          JaxparError: If the bucket cannot be read, or lacks files of the copy at the end.
        """
        self._say(f"{self.address}: on this machine it is {self.local}")
        self.pull()
        try:
            yield
        except BaseException:
            self.push()
            raise
        self.finish()

    def push(self) -> None:
        """Makes the bucket equal to the copy. A failure is printed; the next push tries again, and `finish` raises."""
        with self._lock:
            try:
                with _Talking(self.address, "written"):
                    self._push()
            except JaxparError as error:
                if not self._failed:
                    self._say(f"{error.problems[0].got}; training goes on, and the next checkpoint tries again")
                self._failed = error.problems[0].got
            else:
                self._failed = ""

    def finish(self) -> None:
        """Pushes for the last time.

        Raises:
          JaxparError: If the bucket lacks files of the copy.
        """
        self.push()
        if self._failed:
            raise refuse(
                self._failed,
                rule="a run in a bucket is uploaded completely when it ends",
                fix=f"all of it is in {self.local}: copy that, or run the same command once the bucket can be written",
            )

    def _push(self) -> None:
        files = _copied_files(self.local)
        changed = [name for name in files if self._pushed.get(name) != files[name]]
        for name in sorted(changed, key=lambda name: (name.endswith(MANIFEST), name)):
            try:
                self._put(name)
            except FileNotFoundError:
                if (self.local / name).exists():
                    raise
                continue  # of a checkpoint deleted in the meantime
            self._pushed[name] = files[name]
        deleted = self._pushed.keys() - _copied_files(self.local).keys()
        for name in sorted(deleted, key=lambda name: not name.endswith(MANIFEST)):
            if self._files.exists(f"{self._root}/{name}"):
                self._files.rm_file(f"{self._root}/{name}")
            del self._pushed[name]

    def _put(self, name: str) -> None:
        """Writes a file atomically, as object stores do; on a disk by renaming the complete file."""
        target = f"{self._root}/{name}"
        part = f"{target}.part" if self.address.startswith(tuple(f"{scheme}:" for scheme in DISK)) else target
        self._files.put_file(str(self.local / name), part)
        if part != target:
            self._files.mv(part, target)

    def _remote(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._files.exists(self._root):
            for path, info in self._files.find(self._root, detail=True).items():
                yield path[path.index(self._root.strip("/")) + len(self._root.strip("/")) :].lstrip("/"), info

    def _is_same(self, name: str) -> bool:
        """Whether a small file is equal in copy and bucket."""
        path = self.local / name
        with _Talking(self.address, "read"):
            return path.is_file() and path.read_bytes() == self._files.cat_file(f"{self._root}/{name}")


def _copied_files(local: Path) -> dict[str, tuple[int, int]]:
    """Returns (size, mtime) of the copy's files, by name."""
    files = {}
    for folder, _, names in os.walk(local):
        for file_name in names:
            path = Path(folder, file_name)
            name = path.relative_to(local).as_posix()
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if not LOCAL.fullmatch(name):
                files[name] = status.st_size, status.st_mtime_ns
    return files


def _complete_checkpoints(folder: Path) -> list[str]:
    """Returns the folders of the copy's checkpoints that have a MANIFEST."""
    names = (path.parent.name for path in folder.glob(f"checkpoints/*/{MANIFEST}"))
    return [f"checkpoints/{name}" for name in names if name.isdigit()]


class _Talking:
    """Turns any error of a bucket's package into a `JaxparError`: every package has its own errors."""

    def __init__(self, address: str, what: str):
        self.address, self.what = address, what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, JaxparError):
            raise refuse(
                f"{self.address} could not be {self.what}: {describe_exception(error)}",
                rule="the bucket exists, and this machine may read and write it",
                fix="check its name and region and the credentials of this machine, or use a folder of the file system",
            ) from error


def pull_folder(path: str | Path) -> Path:
    """Returns a folder to read: the path itself, `~` expanded, or the up-to-date copy of an address.

    Raises:
      JaxparError: If the address cannot be read, or the path begins with the home of an unknown user.
    """
    if not is_address(path):
        return expand_home(path, "folder")
    bucket = Bucket(path, kind=READ_ONLY)
    bucket.pull()
    return bucket.local


def fetch(path: str) -> str:
    """Returns a path of data: the path itself, or the local copy of an address; a glob stays a glob.

    A file whose version is unchanged is not copied again.

    Raises:
      JaxparError: If the address cannot be read.
    """
    if not is_address(path):
        return path
    check_address(path, "data.path")
    target = local_folder(path)
    index = target.parent / f".{target.name.replace('*', '_')}.index.json" if "*" not in str(target) else None
    versions = json.loads(index.read_text()) if index and index.exists() else {}
    with _Talking(path, "read"):
        files, root = _file_system(path)
        names = files.glob(root) if "*" in root else files.find(root) if files.isdir(root) else [root]
        for name in names:
            local_path = local_folder(files.unstrip_protocol(name))
            version = str(files.ukey(name))
            if local_path.is_file() and versions.get(name) == version:
                continue
            local_path.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(name, str(local_path))
            versions[name] = version
    if index:
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text(json.dumps(versions))
    return str(target)


def _whole(address: str | Path) -> str:
    """Restores the slashes that `Path` has dropped from an address, and strips those at its end."""
    scheme, _, path = str(address).partition(":")
    slashes = "///" if scheme in DISK else "//"
    return f"{scheme}:{slashes}{path.strip('/')}"


def _file_system(address: str) -> tuple[Any, str]:
    """Returns the fsspec file system of an address, and the path in it."""
    options = {"auto_mkdir": True} if address.partition(":")[0] in DISK else {}
    return fsspec.core.url_to_fs(address, **options)


def _checkpoint(name: str) -> str:
    """Returns the checkpoint folder of a file, or ""."""
    match = re.match(r"(checkpoints/\d+)/", name)
    return match[1] if match else ""
