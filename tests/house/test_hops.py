"""The path of a batch is straight: from the file of tokens to the value of the loss it passes through few files.

A file of jaxpar counts where one of its functions is given, gives back, or is handed by another

    the file of packed tokens      while it is opened
    the batch's arrays             on the host, on the devices, or while the step is traced

from the opening of the data on: what is asked of shapes alone, before there is a batch, does not count, nor do models,
which are the user's, and errors.
"""

import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import jaxpar
from jaxpar.data.sources import open_data
from jaxpar.job.file.parse import loads
from jaxpar.job.run import train

HOUSE = str(Path(jaxpar.__file__).parent)
LEFT_OUT = ("models/", "errors.py")
ROWS, SEQ, MOST = 6, 14, 12  # numbers that no other array has
JOB = f"""
[mesh]
devices = 2
[parallel]
fsdp = 2
[model]
layers = 1
dim = 16
heads = 2
[data]
source = "text"
path = "text.txt"
seq = {SEQ}
held_out = 0.0
[train]
steps = 1
global_batch = {ROWS}
"""


def is_of_the_batch(value, depth=2):
    if isinstance(value, Path):
        return value.suffix == ".bin"
    if isinstance(value, Mapping):
        return depth > 0 and any(is_of_the_batch(each, depth - 1) for each in value.values())
    if isinstance(value, (tuple, list)):
        return depth > 0 and any(is_of_the_batch(each, depth - 1) for each in value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return shape in ((ROWS, SEQ), (ROWS, SEQ + 1)) and np.issubdtype(dtype, np.integer)


@contextmanager
def watched():
    """Yields the files that the batch passes through, in the order in which they come to it."""
    passed: dict[str, None] = {}

    def note(frame):
        path = frame.f_code.co_filename
        if path.startswith(HOUSE) and not (own := path[len(HOUSE) + 1 :]).startswith(LEFT_OUT):
            passed.setdefault(own)

    opened = False

    def look(frame, event, returned):
        nonlocal opened
        if not frame.f_code.co_filename.startswith(HOUSE):
            return
        opened = opened or frame.f_code.co_name == open_data.__name__
        if not opened:
            return
        if event == "call" and any(map(is_of_the_batch, list(frame.f_locals.values()))):
            note(frame)
        elif event == "return" and is_of_the_batch(returned):
            note(frame)
            note(frame.f_back)

    sys.setprofile(look)
    try:
        yield passed
    finally:
        sys.setprofile(None)


@pytest.mark.full
def test_a_batch_of_text_reaches_the_loss_through_twelve_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a line of text\n" * 100)
    with watched() as passed:
        train(loads(JOB, [f"run.dir={tmp_path / 'run'}"]))
    assert {"data/text.py", "train/loop.py", "step/step.py", "step/losses.py"} <= passed.keys()
    assert len(passed) <= MOST, "\n".join(passed)
