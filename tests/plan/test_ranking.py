"""Rank of predictions among layouts of one model that others measured: BLOOM's on 384 A100s."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.plan.machine.software import MEGATRON_BLOCKING
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.time import step_time
from jaxpar.plan.validation import rank_correlation

A100 = HARDWARE["a100"]
PORT = 0.92 * 100e9 / 8 / 2  # four Omni-Path ports of 100 Gb/s for eight GPUs, and the share that collectives reach
JEAN_ZAY = replace(A100, between=replace(A100.between, bandwidth=PORT))
ROWS = 2048  # of a step; measured with fewer, the seconds are not comparable


def measured():
    """Returns BLOOM's rows with this global batch."""
    text = (Path(__file__).parents[1] / "plan/bloom_topologies.csv").read_text(encoding="utf-8")
    runs = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    rows = lambda run: int(run["fsdp"]) * int(run["microbatch"]) * int(run["microbatches"])  # noqa: E731
    return [run for run in runs if rows(run) == ROWS]


def predicted(run, software):
    """Returns the seconds of a step."""
    shape = Shape(
        layers=int(run["layers"]), dim=int(run["hidden"]), heads=int(run["heads"]), vocab=int(run["vocab"]),
        seq=int(run["seq"]), learned=True, biases=True, tied=True,
    )  # fmt: skip
    sizes = {key: int(run[key]) for key in ("fsdp", "zero", "tensor", "pipe", "microbatch", "microbatches")}
    return float(step_time(shape, Candidate(**sizes, remat=run["remat"]), JEAN_ZAY, software).total)


def rank(runs, software):
    return rank_correlation([float(run["seconds"]) for run in runs], [predicted(run, software) for run in runs])


def test_layouts_of_bloom_are_ranked_as_they_were_measured():
    """All with equal global batch: every size of the model, and one size on one day, after nodes were mended.

    With launches that run ahead, as other practices have them, it is .34 and .63.
    """
    every = measured()
    alike = [run for run in every if run["model"] == "gpt-72x14336" and run["measured_on"] == "2022-02-25"]
    assert (len(every), len(alike)) == (27, 11)
    assert rank(alike, MEGATRON_BLOCKING) >= 0.7
    assert rank(every, MEGATRON_BLOCKING) >= 0.6


@pytest.mark.parametrize("times", [0.07, 2.0])  # 15 to 430 us
def test_the_rank_does_not_hang_on_what_an_op_takes_the_host(times):
    waits = tuple(times * each for each in MEGATRON_BLOCKING.host_stalls)
    alike = [run for run in measured() if run["model"] == "gpt-72x14336" and run["measured_on"] == "2022-02-25"]
    assert rank(alike, replace(MEGATRON_BLOCKING, host_stalls=waits)) >= 0.6
