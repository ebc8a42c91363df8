"""Memory of a pipelined step as its microbatches grow, beside what JAX's own differentiation makes of GPipe.

    autodiff GPipe   a scan over microbatches + stages - 1 ticks, rematerialized, differentiated as a whole: forwards
                     come before backwards, and every tick leaves a stage input (MaxText, praxis, AXLearn)

Nothing is run: XLA's temporary bytes per device are read off the compiled program, for simulated devices and for
eight H100s that need not be there. The size of a microbatch stays the same.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp
from jaxpar.measure.record import where
from jaxpar.pipeline.run.execute import TableGradients
from jaxpar.pipeline.run.stage import Keep
from jaxpar.pipeline.run.stage_buffers import load
from jaxpar.pipeline.tables.library import schedule
from jaxpar.step.pipelined.synchronous import Pipelined
from jaxpar.units import show_bytes

STAGES, ROWS, SEQ = 4, 2, 128
MODEL = jp.DecoderConfig(vocab=256, seq=SEQ, layers=8, dim=128, heads=4)
MICROBATCHES = (4, 8, 16, 32, 64)
SCHEDULES = ("gpipe", "1f1b", "1f1b_phased", "interleaved_phased", "looped_bfs", "zb_h1", "zb_v")
FLAT = ("1f1b", "1f1b_phased")
BOUNDS = {"flat": 1.01, "autodiff": 1.02}
BASELINE = "autodiff gpipe"


class Autodiff(Pipelined):
    """GPipe as JAX differentiates it, in place of the table."""

    def _execute(self, table, model, rows, shared, layers, known):
        stages, count = table.schedule.stages, table.schedule.microbatches
        stage = jax.lax.axis_index("pipe")

        def objective(shared, layers):
            def tick(x, t):
                one = lambda m: load(known, jnp.minimum(m, count - 1))  # noqa: E731
                embedded, per_layer = model.embed(shared, one(t - stage))
                y = model.stage(layers, one(t - stage), per_layer, jnp.where(stage == 0, embedded, x), stage)
                out = t - (stages - 1)
                sums = model.head(shared, one(out), y)
                counts = (stage == stages - 1) & (out >= 0)
                sums = jax.tree.map(lambda value: jnp.where(counts, value, 0), sums)
                return jax.lax.ppermute(y, "pipe", [(i, i + 1) for i in range(stages - 1)]), sums

            first, _ = jax.eval_shape(model.embed, shared, load(known, 0))
            ticks = jnp.arange(count + stages - 1)
            _, sums = jax.lax.scan(jax.checkpoint(tick), jnp.zeros(first.shape, first.dtype), ticks)
            sums = jax.tree.map(jnp.sum, sums)
            return sums["loss"][0], sums

        (shared, layers), sums = jax.grad(objective, argnums=(0, 1), has_aux=True)(shared, layers)
        return TableGradients(sums=sums, shared=shared, layers=layers)


def temporary(name: str, microbatches: int, devices: Any, *, keep: Keep = "inputs") -> int:
    """Returns XLA's temporary bytes per device of a step of the small decoder on `STAGES` stages."""
    table = "gpipe" if name == BASELINE else name
    pipeline = jp.Pipeline(schedule=table, microbatches=microbatches, keep=keep)
    layout = jp.compose(partial(jp.Decoder, MODEL), jp.Parallel(pipe=STAGES, data=-1, pipeline=pipeline), devices)
    step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3))
    if name == BASELINE:
        step.gradients = Autodiff(layout, jp.next_token_loss, step.numerics)
    tokens = jax.ShapeDtypeStruct((ROWS * microbatches * layout.replicas, SEQ), jnp.int32)
    program = step.lower(step.abstract(), {"inputs": tokens, "targets": tokens}).compile()
    return program.memory_analysis().temp_size_in_bytes


def _growth(name: str, counts: tuple[int, ...], found: list[int]) -> float:
    """Returns the largest bytes over the smallest, of those numbers of microbatches that fill the pipeline.

    With fewer a stage keeps fewer inputs: min(M, 2P - 1) in 1f1b_phased.
    """
    kept = [schedule(name, stages=STAGES, microbatches=count).peak for count in counts]
    full = [size for size, peak in zip(found, kept, strict=True) if peak == kept[-1]]
    return max(full) / min(full)


def pipeline(*, schedules: tuple[str, ...] = SCHEDULES, counts: tuple[int, ...] = MICROBATCHES) -> dict[str, Any]:
    """Compiles every schedule for every number of microbatches, prints a table, and says whether the bounds hold."""
    jp.simulate(8)
    tables = {}
    for device, devices in (("8 simulated devices", jax.devices()), ("8 H100s", jp.target_devices("h100:1x8"))):
        print(f"\nTemporary memory per device, {STAGES} stages x data 2, {device}, keep = inputs")
        print(f"{'microbatches':<20}" + "".join(f"{count:>12}" for count in counts))
        rows = tables[device] = {}
        for name in (BASELINE, *schedules):
            print(f"{name:<20}", end="", flush=True)
            rows[name] = []
            for count in counts:
                try:
                    rows[name].append(temporary(name, count, devices))
                except jp.JaxparError as error:  # too few microbatches for this schedule: a hole in the table
                    if name == BASELINE or "microbatches" not in error.problems[0].rule + error.problems[0].got:
                        raise
                    rows[name].append(None)
                print(f"{show_bytes(rows[name][-1]) if rows[name][-1] else '-':>12}", end="", flush=True)
            print()
    checks = {
        f"{name}, {device}": {
            "flat": _growth(name, counts, rows[name]),
            "autodiff": max(mine / theirs for mine, theirs in zip(rows[name], rows[BASELINE], strict=True)),
        }
        for device, rows in tables.items()
        for name in FLAT
        if name in rows
    }
    holds = all(found[key] <= bound for found in checks.values() for key, bound in BOUNDS.items())
    for name, found in checks.items():
        print(f"{name}: largest over smallest {found['flat']:.4f}, over autodiff GPipe {found['autodiff']:.3f}")
    bounds = ", ".join(f"{name} {bound}" for name, bound in BOUNDS.items())
    print(f"bounds ({bounds}) {'hold' if holds else 'DO NOT HOLD'}")
    return {"temporary bytes": tables, "microbatches": counts, "checks": checks, "holds": holds, "where": where()}


if __name__ == "__main__":
    from .command import main

    raise SystemExit(main("pipeline"))
