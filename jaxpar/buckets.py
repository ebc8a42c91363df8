"""Run folders and files in buckets: `gs://bucket/run`, `s3://bucket/run`, and every other scheme of fsspec.

    RUN on this machine's disk                      the bucket
    checkpoints/000040/arrays/00000   ──────────►   the same name, when the checkpoint is whole
    checkpoints/000040/MANIFEST       ──────────►   after all of its arrays: without one it is no checkpoint
    metrics.jsonl, run.json, ...      ──────────►   with each checkpoint, and at the end
    all of it                         ◄──────────   when the run starts, unless the copy has a newer checkpoint

A run writes to a folder of its own under the user's cache, exactly as any other run, so that what needs a file system
(renames, locks, maps of memory) has one. One process writes a bucket: several would need a folder that all share.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from jaxpar.errors import JaxparError, describe_exception, nearest, refuse

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash: `Path` drops the other
MANIFEST = "MANIFEST"
READ = "read"  # the copies of what is only read
DISK = ("file", "local")  # the schemes of a disk, such as one that is mounted from elsewhere
# packed tokens, which are made anew; locks and signs of life, which are of one machine; what is half written
LOCAL = re.compile(r"(data/.*\.bin|.*\.(lock|part)|lock|processes/.*|checkpoints/(?!\d+/).*)")


def is_address(path: str | Path) -> bool:
    """Returns whether a path is the address of an object store: a scheme of more than one letter, and a slash."""
    return SCHEME.match(str(path)) is not None


def check_address(path: str | Path, name: str) -> None:
    """Checks that the package is installed which reads a scheme.

    Args:
      path: A path, or an address.
      name: What it is called for the user, such as run.dir.

    Raises:
      JaxparError: If it is an address whose scheme nothing reads.
    """
    if not (match := SCHEME.match(str(path))):
        return
    scheme = match[1]
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        known = fsspec.available_protocols()
        package = re.search(r"[Ii]nstall (\S+)", str(error))
        raise refuse(
            f"{name} = {str(path)!r:.200}: {error}",
            rule="an address has a scheme of fsspec, whose package is installed",
            fix=f"pip install {package[1]}; or a bucket that is mounted, and its folder"
            if scheme in known and package
            else f"{nearest(scheme, known, otherwise='gs://, s3://, az://')}; or a folder",
        ) from error


def local_folder(path: str | Path, *, kind: str = "buckets") -> Path:
    """Returns the folder on this machine's disk of a run: itself, or where an address has its copy.

    Args:
      path: A folder, or an address.
      kind: The folder of the cache: what is only read has another copy than a run, which may be writing its own.
    """
    if not is_address(path):
        return Path(path)
    scheme, _, rest = str(path).partition(":")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "jaxpar" / kind / scheme / rest.strip("/")


class Bucket:
    """A folder in an object store, and its copy on this machine's disk.

    Args:
      address: Of the folder.
      say: Takes a line for the user.
      kind: Of its copy; see `local_folder`.

    Attributes:
      local: The copy.
    """

    def __init__(self, address: str | Path, say: Callable[[str], None] = print, *, kind: str = "buckets"):
        check_address(address, "address")
        self.address = _whole(address)
        self.local, self._say = local_folder(self.address, kind=kind), say
        self._lock, self._failed = threading.Lock(), ""
        self._pushed: dict[str, tuple[int, int]] = {}
        with self._talking("opened"):
            self._files, root = _file_system(self.address)
        self._root = root.rstrip("/")

    def pull(self) -> None:
        """Makes the copy equal to the bucket: whole checkpoints, and all other files.

        A copy with a newer checkpoint than the bucket has stays as it is: what it has was not written there, as the
        bucket was away or the run was killed, and the next push writes it.

        Raises:
          JaxparError: If the bucket cannot be read.
        """
        with self._talking("read"):
            self._files.invalidate_cache()
            sizes = {name: info["size"] for name, info in self._remote() if not LOCAL.fullmatch(name)}
        whole = {folder for name in sizes if (folder := _checkpoint(name)) and f"{folder}/{MANIFEST}" in sizes}
        newest, there = max(self._whole_here(), default=""), max(whole, default="")
        if newest > there:
            self._say(f"{self.local} has {newest}, {self.address} {there or 'no checkpoint'}: on from the copy")
            return
        wanted = {name: size for name, size in sizes.items() if not (folder := _checkpoint(name)) or folder in whole}
        for name in self._here().keys() - wanted.keys():
            (self.local / name).unlink(missing_ok=True)
        for folder in (self.local / "checkpoints").glob("*"):
            if f"checkpoints/{folder.name}" not in whole:
                shutil.rmtree(folder, ignore_errors=True)
        same = {folder for folder in whole if self._is_same(f"{folder}/{MANIFEST}")}
        with self._talking("read"):
            for name, size in sorted(wanted.items()):
                path = self.local / name
                if _checkpoint(name) in same and path.is_file() and path.stat().st_size == size:
                    continue  # its MANIFEST, which is the bucket's, has the hash of every byte
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}", str(path))
        self._pushed = self._here()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Pulls, and pushes at the end, also before an error.

        Raises:
          JaxparError: If the bucket cannot be read, or does not have all of the copy at the end.
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
        """Makes the bucket equal to the copy. A failure is said; the next push tries again, and `finish` raises."""
        with self._lock:
            try:
                with self._talking("written"):
                    self._push()
            except JaxparError as error:
                if not self._failed:
                    self._say(f"{error.problems[0].got}; training goes on, and the next checkpoint is tried")
                self._failed = error.problems[0].got
            else:
                self._failed = ""

    def finish(self) -> None:
        """Pushes the last time.

        Raises:
          JaxparError: If the bucket does not have all of the copy.
        """
        self.push()
        if self._failed:
            raise refuse(
                self._failed,
                rule="a run in a bucket is there when it ends",
                fix=f"all of it is in {self.local}: copy that, or run the same command once the bucket can be written",
            )

    def _push(self) -> None:
        here = self._here()
        changed = [name for name in here if self._pushed.get(name) != here[name]]
        for name in sorted(changed, key=lambda name: (name.endswith(MANIFEST), name)):
            try:
                self._put(name)
            except FileNotFoundError:
                if (self.local / name).exists():
                    raise
                continue  # a checkpoint that is no longer kept
            self._pushed[name] = here[name]
        for name in sorted(self._pushed.keys() - self._here().keys(), key=lambda name: not name.endswith(MANIFEST)):
            if self._files.exists(f"{self._root}/{name}"):
                self._files.rm_file(f"{self._root}/{name}")
            del self._pushed[name]

    def _whole_here(self) -> list[str]:
        """Returns the folders of the copy's checkpoints that have a MANIFEST."""
        found = (path.parent.name for path in self.local.glob(f"checkpoints/*/{MANIFEST}"))
        return [f"checkpoints/{name}" for name in found if name.isdigit()]

    def _put(self, name: str) -> None:
        """Writes a file whole or not at all, as object stores do; on a disk it gets its name when it is whole."""
        there = f"{self._root}/{name}"
        part = f"{there}.part" if self.address.startswith(tuple(f"{each}:" for each in DISK)) else there
        self._files.put_file(str(self.local / name), part)
        if part != there:
            self._files.mv(part, there)

    def _here(self) -> dict[str, tuple[int, int]]:
        """Returns size and time of the files of the copy, by name."""
        found = {}
        for folder, _, names in os.walk(self.local):
            for each in names:
                path = Path(folder, each)
                name = path.relative_to(self.local).as_posix()
                try:
                    about = path.stat()
                except FileNotFoundError:
                    continue
                if not LOCAL.fullmatch(name):
                    found[name] = about.st_size, about.st_mtime_ns
        return found

    def _remote(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._files.exists(self._root):
            for path, info in self._files.find(self._root, detail=True).items():
                yield path[path.index(self._root.strip("/")) + len(self._root.strip("/")) :].lstrip("/"), info

    def _is_same(self, name: str) -> bool:
        """Returns whether a small file is in the copy as it is in the bucket."""
        path = self.local / name
        with self._talking("read"):
            return path.is_file() and path.read_bytes() == self._files.cat_file(f"{self._root}/{name}")

    def _talking(self, what: str) -> "_Talking":
        return _Talking(self.address, what)


class _Talking:
    """Turns whatever a bucket's package raises into a refusal: each has errors of its own."""

    def __init__(self, address: str, what: str):
        self.address, self.what = address, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, JaxparError):
            raise refuse(
                f"{self.address} could not be {self.what}: {describe_exception(error)}",
                rule="a bucket is there, and this machine may read and write it",
                fix="its name and region, the credentials of this machine, or a folder of the file system",
            ) from error


def opened(path: str | Path) -> Path:
    """Returns a folder to read: itself, or the copy of an address once it is equal to the bucket.

    Raises:
      JaxparError: If the address cannot be read.
    """
    if not is_address(path):
        return Path(path)
    bucket = Bucket(path, kind=READ)
    bucket.pull()
    return bucket.local


def fetched(path: str) -> str:
    """Returns a path of data: itself, or where the files of an address were copied to; a glob stays one.

    A file that is there with the same size and version is not copied again.

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
            to = local_folder(files.unstrip_protocol(name))
            version = str(files.ukey(name))
            if to.is_file() and versions.get(name) == version:
                continue
            to.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(name, str(to))
            versions[name] = version
    if index:
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text(json.dumps(versions))
    return str(target)


def _whole(address: str | Path) -> str:
    """Returns an address with the slashes that `Path` has dropped, and none at its end."""
    scheme, _, rest = str(address).partition(":")
    slashes = "///" if scheme in DISK else "//"
    return f"{scheme}:{slashes}{rest.strip('/')}"


def _file_system(address: str) -> tuple[Any, str]:
    """Returns the file system of an address, and the path in it."""
    more = {"auto_mkdir": True} if address.partition(":")[0] in DISK else {}
    return fsspec.core.url_to_fs(address, **more)


def _checkpoint(name: str) -> str:
    """Returns the folder of the checkpoint that a file is of, "" of none."""
    match = re.match(r"(checkpoints/\d+)/", name)
    return match[1] if match else ""
