"""Compares checkpoints with Orbax's: seconds to save and to restore the same state, and flipped bytes that are found.

Both save and restore in one process, in turn and in random order, so that other load on the machine meets both; the
ratio is taken pair by pair and its median quoted. A save is timed to the end of its write, on the disk; what is deleted
is deleted while no clock runs. Files are read from the page cache, where a disk is no excuse.
"""

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.errors import JaxparError
from jaxpar.measure.record import where
from jaxpar.mesh.devices import describe

SIZES = (8, 256)  # MiB of a state
ARRAYS = 12  # of a state
BOUNDS = {"save": 1.05, "restore": 1.15}
FLIPS = 1000
SPEC = Checkpoints(keep_last=10**6)  # nothing is deleted by the store


def checkpoint(*, rounds: int = 15) -> dict[str, Any]:
    """Measures every size, prints a table, and returns it with whether the bounds hold.

    Args:
      rounds: Interleaved pairs of saves and restores, per size.
    """
    jp.simulate(8)
    print(f"{describe(jax.devices())}, jax {jax.__version__}, {rounds} pairs; seconds of processor time in brackets")
    print(f"{'state':<10}{'save / Orbax':>24}{'restore / Orbax':>26}")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            rows[f"{size} MiB"] = row = _compare(Path(folder), size, rounds)
            told = (f"{row[kind]:.2f} ({row[f'{kind} cpu']:.2f})" for kind in BOUNDS)
            print(f"{size:>5} MiB {''.join(f'{each:>25}' for each in told)}", flush=True)
        found = flips_found(Path(folder), FLIPS)
    print(f"{found} of {FLIPS} flipped bytes found by restoring")
    holds = found == FLIPS and all(row[kind] <= bound for row in rows.values() for kind, bound in BOUNDS.items())
    bounds = ", ".join(f"{name} {bound}" for name, bound in BOUNDS.items())
    print(f"bounds ({bounds}) {'hold' if holds else 'DO NOT HOLD'}")
    return {"states": rows, "flips": FLIPS, "found": found, "bounds": BOUNDS, "holds": holds, "where": where()}


def flips_found(folder: Path, flips: int) -> int:
    """Returns how many of so many checkpoints, each with one byte altered, are refused when they are restored."""
    state, draw = _state(1, arrays=2), random.Random(0)
    store = Store(folder / "flips", SPEC, is_owner=False)
    store.save(1, state, {})
    store.finish()
    files = sorted(path for path in store.path(1).rglob("*") if path.is_file())
    return sum(_is_found(store, state, draw.choice(files), draw) for _ in range(flips))


def _is_found(store: Store, state: Any, path: Path, draw: random.Random) -> bool:
    at, mask = draw.randrange(path.stat().st_size), draw.randrange(1, 256)
    for end in (False, True):  # altered, then as it was
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ mask]))
        if end:
            break
        try:
            store.restore(_wanted(state))
            found = False
        except JaxparError:
            found = True
    return found


def _compare(folder: Path, size: int, rounds: int) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    state, draw = _state(size), random.Random(0)
    wanted = _wanted(state)
    ours, theirs = folder / "ours", folder / "theirs"

    def save() -> None:
        store = Store(ours, SPEC)
        store.save(1, state, {})
        store.finish()

    acts: dict[str, dict[str, Callable[[], Any]]] = {
        "save": {"ours": save, "theirs": lambda: ocp.save_async(str(theirs), state).result()},
        "restore": {
            "ours": lambda: Store(ours, SPEC).restore(wanted),
            "theirs": lambda: ocp.load(str(theirs), wanted),
        },
    }
    taken = {kind: {"ours": [], "theirs": []} for kind in acts}
    for turn in range(rounds + 1):
        for path in (ours, theirs):
            shutil.rmtree(path, ignore_errors=True)
        for kind, sides in acts.items():
            for side in draw.sample(("ours", "theirs"), 2):
                clock = time.perf_counter(), time.process_time()
                jax.block_until_ready(sides[side]())
                if turn:  # the first warms up
                    taken[kind][side].append((time.perf_counter() - clock[0], time.process_time() - clock[1]))
    row: dict[str, Any] = {}
    for kind, sides in taken.items():
        for index, name in enumerate((kind, f"{kind} cpu")):
            pairs = [(mine[index], its[index]) for mine, its in zip(*sides.values(), strict=True)]
            row[name] = statistics.median(mine / its for mine, its in pairs)
            row[f"{name} seconds"] = [statistics.median(each) for each in zip(*pairs, strict=True)]
    return row


def _state(size: int, arrays: int = ARRAYS) -> dict[str, jax.Array]:
    """Returns arrays of so many MiB together, split over all devices; numbers as weights have them."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    numbers = np.random.default_rng(0)
    shape = (8, size * 2**20 // 4 // arrays // 8)
    return {
        f"w{index}": jax.device_put(numbers.standard_normal(shape, np.float32) * 0.02, split) for index in range(arrays)
    }


def _wanted(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("checkpoint"))
