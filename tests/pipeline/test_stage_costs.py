"""What a table of unequal stages is predicted to cost, beside the program compiled for absent H100s."""

import random
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.hlo.flop import equation_flop, op_flop
from jaxpar.hlo.trip_counts import trip_count
from jaxpar.inspector import report
from jaxpar.mesh.chips import CHIPS
from jaxpar.partition.stage_costs import costs_of_chain, costs_of_parts, op_times, waiting_share
from jaxpar.partition.traced_chain import FORWARDS
from jaxpar.pipeline.tables.library import schedule
from jaxpar.pipeline.tables.price import OpTimes
from jaxpar.sharding.names import CHOICE
from jaxpar.step.pipelined.unequal_stages import UnequalStages

SIDE, ROWS, CLASSES = 8, 4, 10  # pixels, examples of a microbatch
H100 = next(chip for chip in CHIPS if chip.key == "h100")


class Drawn(nnx.Module):
    """Convolutions and dense layers of drawn widths."""

    def __init__(self, convolutions, widths, rngs):
        channels = [3, *convolutions]
        self.convolutions = nnx.List(
            [nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in zip(channels, convolutions, strict=False)]
        )
        sizes = [SIDE * SIDE * channels[-1], *widths]
        self.dense = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in zip(sizes, widths, strict=False)])
        self.classes = nnx.Linear(sizes[-1], CLASSES, rngs=rngs)

    def __call__(self, images):
        pieces = [lambda x, layer=layer: nnx.relu(layer(x)) for layer in self.convolutions]
        pieces += [lambda x, layer=layer: nnx.relu(layer(x.reshape(len(x), -1))) for layer in self.dense]
        return self.classes(jp.pipelined(pieces, images))


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"])
    return losses.sum(), losses.size


def drawn(seed):
    """Returns a model and its pipeline."""
    numbers = random.Random(seed)
    stages = numbers.randint(2, 4)
    convolutions = [numbers.choice([8, 16, 24, 32]) for _ in range(numbers.randint(1, 4))]
    widths = [numbers.choice([16, 32, 64, 128]) for _ in range(max(stages - len(convolutions), numbers.randint(1, 4)))]
    pieces = len(convolutions) + len(widths)
    ends = [0, *sorted(numbers.sample(range(1, pieces), stages - 1)), pieces]
    pipeline = jp.Pipeline(
        stages=tuple(int(n) for n in np.diff(ends)), schedule=numbers.choice(["1f1b", "gpipe", "zb_h1"]),
        microbatches=numbers.choice([4, 6, 8]), keep=numbers.choice(["inputs", "residuals"]),
    )  # fmt: skip
    return lambda rngs: Drawn(convolutions, widths, rngs), pipeline


def compiled(model, pipeline, monkeypatch):
    """Returns the traced pieces, the table, the module and the schedule of a step for absent GPUs."""
    devices = sum(pipeline.replicas) or len(pipeline.stages)
    layout = jp.compose(model, jp.Parallel(pipe=devices, pipeline=pipeline), jp.target_devices(f"h100:1x{devices}"))
    tables, modules, make_table, parse = [], [], UnequalStages._table, report.parse

    def table_of(self, pieces, stored, *, train):
        table = make_table(self, pieces, stored, train=train)
        tables.append((pieces, table))
        return table

    def parsed(text):
        modules.append(parse(text))
        return modules[-1]

    monkeypatch.setattr(UnequalStages, "_table", table_of)
    monkeypatch.setattr(report, "parse", parsed)
    rows = ROWS * pipeline.microbatches
    batch = {
        "images": jax.ShapeDtypeStruct((rows, SIDE, SIDE, 3), np.float32),
        "labels": jax.ShapeDtypeStruct((rows,), np.int32),
    }
    jp.inspect(jp.train_step(layout, loss, optax.sgd(0.1)), batch)
    return *tables[0], modules[0], layout.schedule


def flop_of(module, computation):
    total = 0
    for op in module.computations[computation]:
        total += op_flop(module, computation, op)
        times = trip_count(op) or 1
        total += sum(times * flop_of(module, name) for name in op.callees if op.opcode != "reduce")
    return total


def compiled_waiting(module, table):
    """Returns the share of waiting if a device takes as long for a branch as its FLOP say."""
    (choice,) = [op for _, op in module.ops() if op.opcode == "conditional" and op.label.endswith(f"{CHOICE}/cond")]
    flop = np.array([flop_of(module, name) for name in choice.callees])
    cells = flop[np.repeat(table.rows[..., 0], table.replicas.counts, axis=1)]
    return 1 - cells.sum() / (cells.shape[1] * cells.max(axis=1).sum())


def carried_bytes(module, ticks, microbatches):
    """Returns the bytes that the loop over ticks carries, without the batch, numbers of rows and counters."""
    (loop,) = [op for _, op in module.ops() if op.opcode == "while" and trip_count(op) == ticks]
    images = 4 * microbatches * ROWS * SIDE * SIDE * 3
    return sum(array.bytes for array in loop.arrays if array.dtype not in ("s32", "pred")) - images


DEFAULT = {1, 2, 15}  # a table each of gpipe, 1f1b and zb_h1


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in DEFAULT else [pytest.mark.full]) for seed in range(20)]
)
def test_waiting_and_memory_are_those_of_the_compiled_program(seed, monkeypatch):
    check_costs(*drawn(seed), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("keep", ["inputs", "residuals"])
@pytest.mark.parametrize(("seed", "replicas"), [(2, (3, 1)), (9, (2, 1, 1)), (11, (1, 2, 1))])
def test_replicas_share_the_microbatches_of_a_group(seed, replicas, keep, monkeypatch):
    model, pipeline = drawn(seed)
    microbatches = 4 * max(replicas)
    check_costs(model, replace(pipeline, replicas=replicas, microbatches=microbatches, keep=keep), monkeypatch)


def check_costs(model, pipeline, monkeypatch):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    pieces, table, module, rows = compiled(model, pipeline, monkeypatch)
    forwards = [0.0] * sum(pipeline.stages)
    for eqn, piece in zip(pieces.jaxpr.jaxpr.eqns, pieces.piece_numbers, strict=True):
        forwards[piece] += equation_flop(eqn)
    times = op_times(forwards, pipeline.stages, split=rows.split, keep=pipeline.keep)
    params = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in pieces.params]
    costs = costs_of_parts(table.parts, params, rows, times, table.residuals)
    assert costs.waiting == pytest.approx(compiled_waiting(module, table), rel=0.01)
    assert costs.bytes == pytest.approx(carried_bytes(module, rows.ticks, pipeline.microbatches), rel=0.01)
    # the chain alone says as much of all but residuals
    chain = costs_of_chain(pieces.chain(H100), pipeline.stages, rows, 1 / FORWARDS)
    assert (chain.parameters, chain.gradients, chain.inbox) == (costs.parameters, costs.gradients, costs.inbox)


def test_of_two_stages_the_faster_waits_for_the_slower():
    """1f1b of 2 stages and 2 microbatches: F0 | F1 F0 | B0 | B1 F1 ... as drawn by `jaxpar schedule`."""
    table = schedule("1f1b", stages=2, microbatches=2)
    ops = OpTimes((1.0, 0.0), (2.0, 4.0), (1.0, 2.0))
    cost = {("F", 0): 1.0, ("B", 0): 3.0, ("F", 1): 0.0, ("B", 1): 6.0}
    ticks = [[cost[cell.op, stage] for stage, cell in enumerate(row) if cell] for row in table.cells]
    expected = 1 - sum(map(sum, ticks)) / (2 * sum(map(max, ticks)))
    assert waiting_share(table, ops) == pytest.approx(expected)
    # every stage twice, for the other microbatches of a group: the devices wait as long
    assert waiting_share(replace(table, replicas=(2, 2)), ops) == pytest.approx(expected)
