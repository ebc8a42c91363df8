"""A command in a terminal of its own, for tests of what a user sees there."""

import os
import pty
import subprocess
import sys
from contextlib import suppress


def said(words, *, typed=b"", **settings):
    """Returns what `python -m jaxpar` with these words says in a terminal, where these bytes are typed ahead."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jaxpar", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **settings) as child:
        os.close(theirs)
        os.write(ours, typed)
        heard = b""
        with suppress(OSError):  # how a terminal ends whose other side is gone
            while part := os.read(ours, 65536):
                heard += part
        assert child.wait(60) == 0
    os.close(ours)
    return heard
