"""What public large runs used, beside what a plan would have told those who ran them.

`public_large_runs.csv` has eleven, with their sources and what these do not tell. For each the planner is asked as
its users could have asked: their GPUs, batch and software, and of layouts those that this software could run. A layout
here is a mesh with a ZeRO stage; microbatches, schedule and recomputation are settings of it, which a plan chooses too.

    first three    the mesh used is among the first three of the plan
    equal          it is not, but as run it fits and takes as long as the first, as far as a plan can tell
    cheaper        the first is predicted to be faster than what was run
    compiled       so it is, and its memory, as jaxpar's own program is compiled, fits: `compiled_public_runs.py`
    too large      what was run is as fast as the first, or faster, but predicted not to fit

`pytest -n 0 -s -m "" tests/plan/test_public_runs.py` prints them.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from bench.published.read import Run, load
from compiled_public_runs import needed, record
from pairwise import some

from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel.declaration import DECLARED
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import select
from jaxpar.plan.machine.software import TORCHTITAN, SoftwareModel
from jaxpar.plan.measurements.prediction_errors import ErrorEstimate, HeldOutRun, estimate, load_published
from jaxpar.plan.model.state_bytes import JAXPAR, MEGATRON, PAPER, Recipe
from jaxpar.plan.model_protocol import Transformer
from jaxpar.plan.search import Plan, Question, Ranked, describe, predict, search

RUNS = {run.row["model"]: run for run in load(Path(__file__).parents[1] / "plan/public_large_runs.csv")}
HBM2E = 16_000_000_000  # bytes that torchtitan's H100s of 96 GB have more than others
# of a PyTorch process that are not its tensors': CUDA's context, NCCL's buffers. Of BLOOM's timings one took 76 of the
# 79.2 GiB of an A100 (id 265 of more_published_runs.csv); jaxpar's own pool is XLA's, taken beforehand
OUTSIDE = 3 * 2**30


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a software could run when it was used.

    Attributes:
      choices: Schedules, recomputation and the largest axes.
      zero: Stages that its fsdp has; none where it has no fsdp.
      sequence: Whether its tensor axis can shard the stream between blocks, and whether it can leave that.
      accumulates: Whether it adds up gradients of microbatches without a pipeline.
      recipe: Bytes per parameter.
      more: Bytes of memory besides those of the planner's chip.
      pooled: Whether XLA takes its share of the memory beforehand.
    """

    choices: Choices
    zero: tuple[int, ...] = ()
    sequence: tuple[bool, ...] = (False,)
    accumulates: bool = True
    recipe: Recipe = MEGATRON
    more: int = 0
    pooled: bool = False

    def room(self, run: Run) -> int:
        """Returns the bytes of a device that tensors may take."""
        chip = run.hardware.chip
        return (chip.usable_memory if self.pooled else chip.visible_memory - OUTSIDE) + self.more


TABLES = ("1f1b", "interleaved")
LM_2021 = Choices(schedules=TABLES, chunks=(2, 3, 4, 8), remats=("none", "full"), context=1)
STACKS = {
    # arXiv 2104.04473: interleaved pipelines; the sequence axis, selective recomputation and sharded state came later
    "Megatron-LM 2021": Stack(choices=LM_2021),
    "Megatron and DeepSpeed": Stack(choices=replace(LM_2021, schedules=("1f1b",))),  # arXiv 2201.11990, section 2.3
    # arXiv 2211.05100, section 3.4: ZeRO-1
    "Megatron-DeepSpeed": Stack(choices=replace(LM_2021, schedules=("1f1b",)), zero=(1,)),
    # arXiv 2205.01068, section 2.4: parameters in float16, Adam's state sharded; without pipelines
    "metaseq": Stack(choices=replace(LM_2021, pipe=1), zero=(2, 3), recipe=PAPER),
    # arXiv 2407.21783, section 3.3.2; of 128 chunks on 16 stages the first and the last have no layer
    "Meta": Stack(
        choices=Choices(schedules=TABLES, chunks=(2, 4, 8), uneven=True, remats=("none", "selective", "full")),
        zero=(1, 2, 3), sequence=(False, True),
    ),
    # at the end of 2024: tensor always with sequence, no accumulation, parameters gathered for a layer or for a step
    "torchtitan": Stack(
        choices=Choices(schedules=TABLES, chunks=(2,), uneven=True, remats=("none", "op", "full"), context=1),
        zero=(2, 3), sequence=(True,), accumulates=False, recipe=JAXPAR, more=HBM2E,
    ),
    "MaxText": Stack(choices=Choices(context=1, pipe=1), zero=(3,), recipe=JAXPAR, pooled=True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AsTheyHad(Question):
    """A question whose layouts are those that a stack can run."""

    stack: Stack

    def legal(self, devices: int = 0) -> Candidate:
        found = super().legal(devices)
        able = np.equal(found.fsdp, 1) | np.isin(found.zero, self.stack.zero)
        able &= np.equal(found.tensor, 1) | np.isin(found.sequence, self.stack.sequence)
        return select(found, able & (self.stack.accumulates | (found.pipe > 1) | (found.microbatches == 1)))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the planner says of a run: the plan, what was run as it predicts it, and its own trust in that."""

    run: Run
    plan: Plan
    used: Ranked
    trust: ErrorEstimate

    @property
    def rank(self) -> int:
        """The place of the mesh used with its ZeRO stage; 0 where none of its settings fits."""
        used, points = mesh(self.used.candidate), self.plan.points
        for place, each in enumerate(self.plan.best, 1):
            if mesh(each.candidate) == used:
                return place
        keys = np.stack([*(points.layouts.size(axis) for axis in DECLARED), np.asarray(points.layouts.zero)], axis=1)
        meshes, which = np.unique(keys, axis=0, return_inverse=True)
        fastest = np.full(len(meshes), np.inf)
        np.minimum.at(fastest, which.ravel(), points.seconds)
        mine = fastest[(meshes == used).all(axis=1)]
        return int((fastest < mine[0]).sum()) + 1 if len(mine) else 0

    @property
    def fits(self) -> bool:
        """Whether what was run is predicted to fit."""
        return bool(self.used.memory.total <= self.plan.question.limit(self.used.candidate))

    @property
    def more(self) -> float:
        """By which share what was run is predicted to take longer than the first."""
        return self.used.time.total / self.plan.best[0].time.total - 1

    @property
    def verdict(self) -> str:
        if 1 <= self.rank <= 3:
            return "first three"
        if self.more <= self.trust.resolution:
            return "equal" if self.fits else "too large"
        bytes_ = record().get((self.run.row["model"], describe(self.plan.best[0].candidate)))
        return "cheaper" if bytes_ is None or bytes_ > self.run.hardware.chip.usable_memory else "compiled"

    def __str__(self) -> str:
        first, run = self.plan.best[0], self.run
        size, room = (each / 2**30 for each in (self.used.memory.total, self.plan.question.limit(self.used.candidate)))
        return (
            f"{run.name}: {self.verdict}; place {self.rank}, as run {self.more:+.1%} of the first (equal within "
            f"{self.trust.resolution:.1%})\n"
            f"  used   {describe(self.used.candidate)}: {run.seconds:.4g} s published, {self.used.time.total:.4g} s "
            f"predicted ({self.used.time.total / run.seconds - 1:+.0%}), {size:.0f} of {room:.0f} GiB\n"
            f"  first  {describe(first.candidate)}: {first.time.total:.4g} s, {first.memory.total / 2**30:.0f} GiB"
        )


def mesh(candidate: Candidate) -> tuple[int, ...]:
    return (*(candidate.size(axis) for axis in DECLARED), candidate.zero)


def software(run: Run) -> SoftwareModel:
    """Returns the software; metaseq's is Megatron-LM's kernels within FSDP, whose collectives run beside them."""
    if run.row["system"] != "metaseq":
        return run.software
    keys = ("layerwise", "overlap", "interference", "exposed_edge_gathers")
    return replace(run.software, **{key: getattr(TORCHTITAN, key) for key in keys})


def question(run: Run) -> AsTheyHad:
    stack = STACKS[run.row["system"]]
    return AsTheyHad(
        model=Transformer(shape=run.shape, recipe=stack.recipe), devices=run.candidate.devices,
        rows=run.rows, hardware=run.hardware, software=software(run), choices=stack.choices, stack=stack,
        memory=stack.room(run),
    )  # fmt: skip


def trusted(run: Run) -> ErrorEstimate:
    """Returns how far off a prediction for the run's own software is expected to be."""
    used = run.candidate
    like = HeldOutRun(
        system="", group="", stack=run.practice, chip=run.hardware.chip.key, devices=used.devices, pipe=used.pipe,
        tensor=used.tensor, error=0.0,
    )  # fmt: skip
    return estimate(like, load_published())


@cache
def answer(model: str) -> Answer:
    run = RUNS[model]
    asked = question(run)
    return Answer(run=run, plan=search(asked, top=3), used=predict(asked, run.candidate), trust=trusted(run))


FOUND = {
    "1T": "first three",
    "MT-NLG 530B": "first three",
    "OPT-175B": "first three",
    "BLOOM": "cheaper",
    "Llama 2 70B": "first three",
    "Llama 3.1 8B": "first three",
    "GPT-3 175B": "compiled",
    "Llama 3.1 405B": "compiled",
    "Llama 3 405B": "compiled",
    "Llama 3 405B on 8,192": "compiled",
    "Llama 3 405B 128k": "first three",
}


def test_the_table_has_eleven_runs_each_with_its_source():
    assert {*FOUND} == {*RUNS}
    assert len(RUNS) == 11
    assert all(run.source for run in RUNS.values())


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "model",
    some(
        FOUND,
        ["OPT-175B", "BLOOM", "Llama 2 70B"],
        ["1T", "MT-NLG 530B", "Llama 3.1 8B", "GPT-3 175B", "Llama 3.1 405B", "Llama 3 405B 128k"],
    ),
)
def test_the_layout_used_is_among_the_first_three_or_the_first_is_cheaper_and_fits_as_compiled(model):
    found = answer(model)
    print(f"\n{found}")
    assert found.verdict == FOUND[model]


def test_ten_of_eleven_are_as_asked():
    """BLOOM's is not: its users timed the plan's first too, with a model like theirs, 6 % slower, in 75 GiB."""
    assert sum(verdict in ("first three", "compiled") for verdict in FOUND.values()) == 10


@pytest.mark.full  # a program for 512 H100s
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_the_record_is_what_xla_assigns():
    found = answer("Llama 3.1 405B")
    first = found.plan.best[0].candidate
    assert needed(found.run.shape, first, "h100") == pytest.approx(
        record()["Llama 3.1 405B", describe(first)], rel=0.02
    )


def test_eight_of_eleven_take_as_long_as_predicted():
    """Within what a plan states for nine runs of ten. Four of them, and relatives of most others, were there to fit."""
    errors = {name: predict(question(run), run.candidate).time.total / run.seconds - 1 for name, run in RUNS.items()}
    print(", ".join(f"{name} {error:+.1%}" for name, error in errors.items()))
    off = {name for name, error in errors.items() if abs(error) > trusted(RUNS[name]).interval}
    assert off == {"MT-NLG 530B", "OPT-175B", "Llama 3.1 405B"}  # the last one ran in Float8
    assert -0.25 < errors["MT-NLG 530B"] < errors["OPT-175B"] < 0
