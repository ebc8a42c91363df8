"""Compares a step of jaxpar with one that an expert wrote by hand: time, memory, launches, bytes on the wire.

Both steps run in one process on simulated devices, in turn, and the median of the ratios is quoted. Without a clock,
the programs are compared as compiled for these devices and for eight H100s that are absent. A row takes minutes: with a
file to write to, a run that was stopped goes on where it was.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

import jaxpar as jp
from jaxpar.inspector.subject import step_subject
from jaxpar.measure.record import where
from jaxpar.mesh.devices import describe
from jaxpar.units import show_bytes

from .. import expert
from ..overhead import ours
from ..overhead.program import Program, compiled
from ..rows import keep, kept

LAYOUTS: dict[str, dict[str, int]] = {
    "data 8": {"data": 8}, "fsdp 8": {"fsdp": 8}, "data 2 x tensor 4": {"data": 2, "tensor": 4},
    "2 x 2 x 2": {"data": 2, "fsdp": 2, "tensor": 2},
}  # fmt: skip
REMAT = {"none": expert.Llama(), "full": expert.Llama(remat=True, unrolled=False)}  # as the expert runs them best
BATCH, CLIP, ADAM = 16, 1.0, partial(optax.adamw, 1e-3, b2=0.95)
TARGET = "h100:1x8"
BOUNDS = {"step": 1.01, "memory on processors": 1.03, "memory on H100s": 1.0, "launches": 1.0, "wire": 1.0}


def against_expert(
    *,
    only: Sequence[str] = (),
    remat: Sequence[str] = tuple(REMAT),
    rounds: int = 60,
    minutes: float = 0.0,
    out: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Measures the chosen rows, prints a table, and returns it with whether the bounds hold.

    Args:
      only: Names of `LAYOUTS`; all of them where empty.
      remat: Names of `REMAT`.
      rounds: Interleaved pairs of steps, per row; 0 compiles only.
      minutes: No row is started that may end after these, judged by the longest so far; 0 is without limit.
      out: A file of JSON lines: rows in it, of the same commit and rounds, are not measured again.
      clock: In seconds.
    """
    jp.simulate(8)
    begin, here, longest = clock(), where(), 0.0
    rows = {
        row["row"]: {key: row[key] for key in ("ours", "expert", "ratios")}
        for row in kept(out, {"rounds": rounds})
        if row["where"]["commit"] == here["commit"]
    }
    print(
        f"{describe(jax.devices())}, jax {jax.__version__}, {rounds} pairs of steps; {TARGET} absent; ours / expert's"
    )
    print(
        f"{'layout, remat':<26}{'step':>7}{'memory, processors':>26}{'memory, H100s':>26}{'launches':>10}{'wire':>26}"
    )
    asked = [(layout, saving) for layout in (only or LAYOUTS) for saving in remat]
    for layout, saving in asked:
        name = f"{layout}, {saving}"
        if name not in rows:
            started = clock()
            if minutes and started + longest - begin > 60 * minutes:
                print(f"{name:<26} not started: {minutes:g} minutes would not do")
                continue
            rows[name] = _measured(REMAT[saving], LAYOUTS[layout], rounds)
            longest = max(longest, clock() - started)
            keep(out, {"row": name, "rounds": rounds, "where": here, **rows[name]})
        print(_line(name, rows[name]), flush=True)
    names = [f"{layout}, {saving}" for layout, saving in asked]
    holds = all(
        name in rows and all(rows[name]["ratios"][key] <= BOUNDS[key] for key in rows[name]["ratios"]) for name in names
    )
    bounds = ", ".join(f"{name} {bound}" for name, bound in BOUNDS.items())
    print(f"bounds ({bounds}) {'hold' if holds else 'DO NOT HOLD'}")
    return {
        "layouts": {name: rows[name] for name in names if name in rows},
        "bounds": BOUNDS,
        "holds": holds,
        "where": here,
    }


def _line(name: str, row: Mapping[str, Any]) -> str:
    mine, theirs = row["ours"], row["expert"]

    def both(device: str, key: str, show: Callable = show_bytes) -> str:
        return f"{show(mine[device][key])} / {show(theirs[device][key])}"

    step = f"{row['ratios']['step']:.3f}" if "step" in row["ratios"] else "-"
    memory = both("processors", "temporary"), both("H100s", "temporary")
    launches, wire = both("H100s", "launches", str), both("H100s", "wire")
    return f"{name:<26}{step:>7}{memory[0]:>26}{memory[1]:>26}{launches:>10}{wire:>26}"


def _measured(model: expert.Llama, sizes: Mapping[str, int], rounds: int) -> dict[str, Any]:
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), ADAM())
    mine: dict[str, Program] = {}
    theirs: dict[str, Program] = {}
    for device, devices in {"processors": jax.devices(), "H100s": jp.target_devices(TARGET)}.items():
        step = ours.like_expert(model, sizes, optimizer, devices)
        mine[device] = compiled(step_subject(step, _shapes(model)).lowered, step.layout.device_mesh)
        mesh = expert.make_mesh(devices, **sizes)
        theirs[device] = compiled(lowered(model, mesh), mesh)
    ratios = {
        "memory on processors": mine["processors"].temporary / theirs["processors"].temporary,
        "memory on H100s": mine["H100s"].temporary / theirs["H100s"].temporary,
        "launches": mine["H100s"].launches / theirs["H100s"].launches,
        "wire": mine["H100s"].wire / theirs["H100s"].wire,
    }
    if rounds:
        ratios["step"] = statistics.median(_timed(model, sizes, optimizer, rounds))
    sides = {"ours": mine, "expert": theirs}
    return {side: {name: asdict(each) for name, each in found.items()} for side, found in sides.items()} | {
        "ratios": ratios
    }


def _shapes(model: expert.Llama) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((BATCH, model.seq), jnp.int32) for name in ("inputs", "targets")}


def lowered(model: expert.Llama, mesh: Mesh) -> Any:
    """Returns the expert's step, lowered for the devices of a mesh."""
    optimizer = ADAM()
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in model.shapes().items()}
    state = params, jax.eval_shape(optimizer.init, params)
    placed = jax.tree.map(
        lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on),
        state,
        expert.shardings(model, optimizer, mesh),
    )
    on = NamedSharding(mesh, expert.P(expert.BATCH))
    tokens = jax.ShapeDtypeStruct((BATCH, model.seq), jnp.int32, sharding=on)
    return expert.build(model, optimizer, mesh, clip=CLIP).lower(placed, tokens, tokens)


def _timed(model: expert.Llama, sizes: Mapping[str, int], optimizer: Any, rounds: int) -> list[float]:
    """Returns the ratios of the times of `rounds` pairs of steps."""
    step = ours.like_expert(model, sizes, optimizer)
    mesh = expert.make_mesh(jax.devices(), **sizes)
    places, moments = expert.shardings(model, ADAM(), mesh)
    params = jax.device_put(expert.init(model, jax.random.key(0)), places)
    states = {
        "ours": jp.init_state(step.layout, optimizer),
        "theirs": (params, jax.jit(ADAM().init, out_shardings=moments)(params)),
    }
    by_hand = expert.build(model, ADAM(), mesh, clip=CLIP)
    tokens = np.random.default_rng(0).integers(0, model.vocab, (BATCH, model.seq + 1), dtype=np.int32)
    batch = step.put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    steps = {"ours": step, "theirs": lambda state, batch: by_hand(state, batch["inputs"], batch["targets"])}
    ratios, order = [], random.Random(0)
    for turn in range(rounds + 1):
        seconds = {}
        for side in order.sample(sorted(steps), 2):  # in random order: load that comes and goes meets both alike
            begin = time.perf_counter()
            states[side], _ = jax.block_until_ready(steps[side](states[side], batch))
            seconds[side] = time.perf_counter() - begin
        if turn:  # the first pair compiles
            ratios.append(seconds["ours"] / seconds["theirs"])
    return ratios
