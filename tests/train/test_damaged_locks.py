"""Whatever lies at RUN/lock, a run begins or is refused and told what it is; it never hangs."""

import json
import os
import re
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from pairwise import some

from jaxpar.errors import JaxparError
from jaxpar.train import lock

STALE = 0.3  # seconds


def listen(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the whole path may be too long


OTHERS = {
    "a dangling link": (lambda path: path.symlink_to("nowhere"), "a link"),
    "a link to itself": (lambda path: path.symlink_to("lock"), "a link"),
    "a link to the lock of another run": (lambda path: path.symlink_to(__file__), "a link"),
    "a link to a folder": (lambda path: path.symlink_to(path.parent), "a link"),
    "a folder": (lambda path: path.mkdir(), "a folder"),
    "a pipe": (os.mkfifo, "a pipe"),
    "a socket": (lambda path: listen(path), "a socket"),
}
HOLDER = asdict(lock.Holder())
TEXTS = {
    "nothing": "",
    "half a lock": json.dumps(HOLDER)[:20],
    "deep JSON": "[" * 200_000,
    "deep JSON in a lock": json.dumps(HOLDER | {"host": 0}).replace("0", "[" * 60_000, 1),
    "much": " " * 10**7 + json.dumps(HOLDER),
    "no object": "3",
    "an empty object": "{}",
    "another's keys": json.dumps({"pid": 3, "owner": "make"}),
    "a host that is no text": json.dumps(HOLDER | {"host": [1]}),
    "a time that is no number": json.dumps(HOLDER | {"since": "monday"}),
    "a time that is no number of seconds": json.dumps(HOLDER | {"since": float("inf")}),
    "a pid that is a path": json.dumps(HOLDER | {"pid": "../../etc"}),
    "a number of 10,000 digits": json.dumps(HOLDER | {"pid": "0"}).replace('"0"', "9" * 10_000),
    "no text": b"\xff\xfe\x00",
}


def taken(folder):
    """Takes and leaves the lock in a thread; returns what was said, or the error. A hang fails the test."""
    said = []

    def take():
        try:
            with lock.Lock(folder, said.append):
                assert lock.read(folder / "lock").pid == os.getpid()
        except Exception as error:
            said.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(15)
    assert not thread.is_alive(), "it hangs"
    return said


@pytest.mark.parametrize("what", OTHERS)
def test_a_lock_that_is_no_plain_file_is_refused_by_its_kind(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, kind = OTHERS[what]
    make(tmp_path / "lock")
    (error,) = taken(tmp_path)
    assert isinstance(error, JaxparError)
    assert error.problems[0].got == f"{tmp_path}/lock is {kind}"
    assert os.path.lexists(tmp_path / "lock")
    (tmp_path / "lock").rename(tmp_path / "elsewhere")  # the fix that is printed
    assert taken(tmp_path) == []


@pytest.mark.parametrize("what", some(TEXTS, ["nothing", "half a lock", "deep JSON"]))
def test_a_lock_that_names_nobody_is_broken_when_it_gives_no_sign_of_life(what, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", STALE)
    text = TEXTS[what]
    (tmp_path / "lock").write_bytes(text if isinstance(text, bytes) else text.encode())
    waits, broken = taken(tmp_path)
    assert "is held by a process that did not say its name: waiting for a sign of life" in waits
    assert re.search(r"no sign of life for \d+ s: its lock is broken", broken)


def test_a_name_in_a_lock_does_not_reach_the_terminal_as_a_command(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", STALE)
    (tmp_path / "lock").write_text(json.dumps(HOLDER | {"host": "\x1b]0;mine\x07"}))
    assert "\x1b" not in "".join(taken(tmp_path))


@pytest.mark.parametrize("call", ["touch", "unlink"])
def test_a_stale_lock_in_a_folder_of_somebody_else_is_refused(call, tmp_path, monkeypatch):
    (tmp_path / "lock").write_text(json.dumps(HOLDER | {"host": "far", "machine": "another"}))
    os.utime(tmp_path / "lock", (time.time() - 900,) * 2)

    allowed = getattr(Path, call)

    def denied(path, *words, **options):
        if call == "touch" or path.name == "lock":  # in a folder as /tmp, files of one's own can be removed
            raise PermissionError(13, "Permission denied")
        return allowed(path, *words, **options)

    monkeypatch.setattr(Path, call, denied)
    (error,) = taken(tmp_path)
    assert isinstance(error, JaxparError)
    assert "Permission denied" in str(error)
