"""One store, two processes with two devices each: they save together, and agree on what is good and what failed."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_integrity import disk  # noqa: F401  a file system of a megabyte

PROGRAM = """
import os, resource, shutil, sys, time
from pathlib import Path
import jax
rank, port, folder, disk = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxpar.errors import JaxparError
from jaxpar.checkpoint import Checkpoints, Store

split = NamedSharding(jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x"))

def say(*words):  # to a file of its own: Gloo prints whatever it likes, wherever a line is
    with open(Path(folder).parent / f"said{rank}", "a") as file:
        print(*words, file=file)

def state(step, size=64):
    numbers = np.random.default_rng(step).random(size).astype(np.float32)
    return {"params": {"w": jax.make_array_from_callback((size,), split, lambda index: numbers[index])}}

def alone(act):
    if rank == 0:
        act()
    sync_global_devices("alone")

def flip():
    path = Path(folder) / "000003" / "arrays" / "00001"
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)

store = Store(Path(folder), Checkpoints(keep_last=5), say=lambda text: say("told", text))
for step in (1, 2, 3):
    store.save(step, state(step), {"loss": 1.0})
store.finish()
alone(flip)
def as_wanted(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

like = as_wanted(state(0))
got, step = store.restore(like)
want = state(2)["params"]["w"]
same = all((a.data == b.data).all() for a, b in zip(got["params"]["w"].addressable_shards, want.addressable_shards))
say("restored", step, same)
try:
    store.restore(like, 3)
except JaxparError as error:
    say("refused", error.problems[0].got)
store = Store(Path(disk) / "checkpoints", Checkpoints(), say=lambda text: say("told", text))
store.save(1, state(1, 40_000), {})
store.wait()
ballast = Path(disk) / "ballast"
alone(lambda: ballast.write_bytes(bytes(shutil.disk_usage(disk).free)))
store.save(2, state(2, 40_000), {})
store.wait()
say("went on")
alone(ballast.unlink)
store.save(3, state(3, 40_000), {})
store.finish()
sync_global_devices("end")
say("good", store.restore(as_wanted(state(0, 40_000)))[1])
store.save(4, state(4, 400), {})
store.wait()
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store.save(5, state(5, 10_000), {})
if rank == 1:
    try:
        store.wait()
    except JaxparError as error:
        say(f"status {error.status}:", error.problems[0].got)
sync_global_devices("failed")
say("there", store.steps())
os._exit(0)  # the first process waits for the second still: in a run it would be told, and end
"""


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_processes_save_together_and_agree(disk, tmp_path):  # noqa: F811
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = [str(port), str(tmp_path / "checkpoints"), str(disk.folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], ended
    first, second = ((tmp_path / f"said{rank}").read_text().splitlines() for rank in (0, 1))
    told = [line for line in first if line.startswith("told")]
    assert [line for line in first if line not in told] == [line for line in second if not line.startswith("status")]
    assert second == ["restored 2 True", second[1], "went on", "good 3", second[4], "there [3, 4]"]
    assert re.fullmatch(r"status 75: step 5 is not saved in \S+: EFBIG", second[4])
    assert "no checkpoint of step 3" in second[1]  # it was set aside
    assert len(told) == 2
    assert "step 2 is used instead; it is called 000003.damaged now" in told[0]
    assert "step 2 is not saved: the disk of" in told[1]
