"""Compares a step of jaxpar with the same program written by hand: time, memory, start-up, and the program itself.

Both steps run in one process, in turn, so that other load on the machine meets both; the
ratio is taken pair by pair and its median quoted. The programs are compared without a clock:
collectives by kind and bytes, and FLOP, as compiled.
"""

import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

import jaxpar as jp
from jaxpar.errors import refuse
from jaxpar.measure.record import where
from jaxpar.mesh.devices import describe

from .. import twin
from ..command import environment
from ..overhead import ours

LAYOUTS = {"data 8": (8, 1, 1), "fsdp 8": (1, 8, 1), "data 2 x tensor 4": (2, 1, 4), "2 x 2 x 2": (2, 2, 2)}
BOUNDS = {"step": 1.02, "temporary": 1.0, "first step": 1.15}
_COLLECTIVE = re.compile(r"= (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def against_twin(*, rounds: int = 60, starts: int = 9, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measures every layout, prints a table, and returns it with whether the bounds hold.

    Args:
      rounds: Interleaved pairs of blocks of steps, per layout.
      starts: Interleaved pairs of whole processes up to the end of their first step, per layout.
      only: Names of `LAYOUTS`; all of them where empty.
    """
    jp.simulate(8)
    print(f"{describe(jax.devices())}, jax {jax.__version__}, {rounds} pairs of steps, {starts} pairs of processes")
    print(f"{'layout':<30}{'step':>8}{'temporary':>22}{'first step':>12}   collectives, FLOP")
    rows: dict[str, dict[str, Any]] = {}
    for name in only or LAYOUTS:
        data, fsdp, tensor = LAYOUTS[name]
        row: dict[str, Any] = _compare((data, fsdp, tensor), rounds)
        row["first step"] = _starts((data, fsdp, tensor), starts)
        rows[name] = row
        more = Counter(row["collectives"]) - Counter(row["twin collectives"])
        equal = row["collectives"] == row["twin collectives"]
        same = f"MORE: {dict(more)}" if more else "the same" if equal else "fewer"
        memory = f"{row['temporary']:>9} / {row['twin temporary']:<10}"
        work = f"{same}, {row['flop']:.6g} / {row['twin flop']:.6g}"
        print(f"{name:<30}{row['step']:>8.3f}{memory}{row['first step']:>12.3f}   {work}", flush=True)
    holds = all(
        row["step"] <= BOUNDS["step"] and row["temporary"] <= row["twin temporary"] * BOUNDS["temporary"]
        and row["first step"] <= BOUNDS["first step"] and row["no more"]
        for row in rows.values()
    )  # fmt: skip
    bounds = ", ".join(f"{name} {bound}" for name, bound in BOUNDS.items())
    print(f"bounds ({bounds}) {'hold' if holds else 'DO NOT HOLD'}")
    return {"layouts": rows, "bounds": BOUNDS, "holds": holds, "where": where()}


def _compare(sizes: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    data, fsdp, tensor = sizes
    mesh = twin.make_mesh(*sizes)
    batch = twin.make_batch(mesh)
    their_state, their_step = twin.build(mesh, twin.make_optimizer())
    their_program = their_step.lower(their_state, batch).compile()
    state, step = ours.build(jp.Parallel(data=data, fsdp=fsdp, tensor=tensor))
    program = step.lower(state, batch).compile()
    state, _ = jax.block_until_ready(step(state, batch))
    their_state, _ = jax.block_until_ready(their_step(their_state, batch))
    ratios, order = [], random.Random(0)
    for _ in range(rounds):
        seconds = {}
        for side in order.sample(("ours", "theirs"), 2):  # in random order: load that comes and goes meets both alike
            begin = time.perf_counter()
            if side == "ours":
                state, _ = jax.block_until_ready(step(state, batch))
            else:
                their_state, _ = jax.block_until_ready(their_step(their_state, batch))
            seconds[side] = time.perf_counter() - begin
        ratios.append(seconds["ours"] / seconds["theirs"])
    collectives, their_collectives = (count_collectives(made.as_text() or "") for made in (program, their_program))
    flop, their_flop = (made.cost_analysis()["flops"] for made in (program, their_program))  # pyright: ignore
    temporary, their_temporary = (made.memory_analysis().temp_size_in_bytes for made in (program, their_program))  # pyright: ignore
    return {
        "step": statistics.median(ratios),
        "temporary": temporary,
        "twin temporary": their_temporary,
        "collectives": collectives,
        "twin collectives": their_collectives,
        "flop": flop,
        "twin flop": their_flop,
        "no more": not (Counter(collectives) - Counter(their_collectives)) and flop <= their_flop * (1 + 1e-6),
    }


def _starts(sizes: tuple[int, int, int], pairs: int) -> float:
    """Returns the median ratio of the times from the start of a process to the end of its first step."""
    ratios = []
    for _ in range(pairs):
        mine, theirs = (_process(module, sizes) for module in ("bench.overhead.ours", "bench.twin"))
        ratios.append(mine / theirs)
    return statistics.median(ratios)


def _process(module: str, sizes: tuple[int, int, int]) -> float:
    begin = time.perf_counter()
    command = [sys.executable, "-m", module, *map(str, sizes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        said = child.stdout.readline() if child.stdout else ""
        seconds = time.perf_counter() - begin
    if said != "first step\n" or child.returncode:
        raise refuse(
            f"{module} ended with status {child.returncode} before its first step",
            rule="the twin and jaxpar's step both run to their end",
            fix="run it alone",
        )
    return seconds


def count_collectives(hlo: str) -> dict[str, int]:
    """Returns how often each collective stands in a compiled program: kind and result array to count."""
    found: Counter[str] = Counter()
    for line in hlo.splitlines():
        if match := _COLLECTIVE.search(line):
            for array in re.findall(r"\w+\[[\d,]*\]", match[1]):  # a combined one counts as its parts
                found[f"{match[2]} {array}"] += 1
    return dict(found)
