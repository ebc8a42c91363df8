"""The named schedules, each with a generator, its source and its closed forms.

    schedule("interleaved_phased", stages=4, microbatches=8)      chunks=2 by default

P is the number of stages, M of microbatches, v of chunks per stage; d is the stage, from 0. Closed forms count ticks:
an F, a B or a W of one chunk takes one tick. With a barrier after every tick, a phased table is best, because no stage
waits for a longer op of another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpar.errors import refuse, suggest
from jaxpar.pipeline.tables.generators import (
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    phased,
    warmup_forwards,
    zb_h1,
    zb_h2,
    zb_v,
)
from jaxpar.pipeline.tables.schedule import Schedule

ANY = range(2, 1025)  # numbers of chunks above 1
PUBLISHED = {  # name of a schedule in a paper to what a job declares for it
    "pipedream": '1f1b, and parallel.pipeline.weights = "stash": an update after every microbatch',
    "pipedream-2bw": '1f1b, and parallel.pipeline.weights = "2bw"',
    "pipedream-flush": "1f1b",
    "dapple": "1f1b",
    "zero-bubble": "zb_h1, zb_h2 or zb_v",
}
MAX_CELLS = 1_000_000  # cells in a table: building one takes seconds; a larger one is probably a typo


@dataclass(frozen=True, kw_only=True)
class ScheduleFamily:
    """A family of schedules.

    Attributes:
      description: One line of description.
      source: The publication.
      make: Maps (stages, microbatches, chunks) to the table.
      ticks: Maps (stages, microbatches, chunks) to the published number of rows of the table (but see `dualpipe_v`).
      peak: Maps (stages, microbatches, chunks, stage) to the published `Schedule.peak[stage]`.
      stash: Maps (stages, microbatches, chunks, stage) to `Schedule.stash[stage]`, which is 0 if a backward is one op.
      chunks: The supported numbers of chunks per stage.
      fewest_microbatches: Maps a number of stages to the fewest microbatches that it supports.
      multiple_of_stages: Whether the number of microbatches must be a multiple of the number of stages.
    """

    description: str
    source: str
    make: Callable[[int, int, int], Schedule]
    ticks: Callable[[int, int, int], int]
    peak: Callable[[int, int, int, int], int]
    stash: Callable[[int, int, int, int], int] = lambda P, M, v, d: 0
    chunks: range = range(1, 2)
    fewest_microbatches: Callable[[int], int] = lambda stages: 1
    multiple_of_stages: bool = False


def schedule(name: str, *, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Returns a schedule of the library.

    Args:
      name: One of `LIBRARY`.
      stages: Size of the axis `pipe`.
      microbatches: Number of parts of the batch, which go through the stages one after the other.
      chunks: Parts of the model on each stage; None is 2 if the schedule supports it, else 1.

    Raises:
      JaxparError: If there is no such schedule, or it does not support these numbers.
    """
    if name not in LIBRARY:
        raise refuse(
            f"schedule {name!r}",
            rule="the name of a schedule in the library, or a CSV file",
            fix=PUBLISHED.get(name.lower().replace("_", "-"), suggest(name, LIBRARY)),
        )
    family = LIBRARY[name]
    if chunks is None:
        chunks = 2 if 2 in family.chunks else 1
    for key, number in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if type(number) is not int or number < 1:
            raise refuse(f"{name} with {key}={number!r}", rule=f"{key} is a positive whole number", fix=f"{key}=4")
    if chunks not in family.chunks:
        low, high = family.chunks.start, family.chunks.stop - 1
        raise refuse(
            f"{name} with chunks={chunks}",
            rule=f"{name} has {low if low == high else f'{low}..{high}'} chunk{'s' * (high > 1)} per stage",
            fix=f"chunks={min(max(chunks, low), high)}" + ', or "interleaved" for more' * (high == 1),
        )
    fewest = family.fewest_microbatches(stages)
    if microbatches < fewest:
        raise refuse(
            f"{name} with microbatches={microbatches} on stages={stages}",
            rule=f"{name} takes at least {fewest} microbatches on {stages} stages",
            fix=f'microbatches={fewest}, or "1f1b", which takes any number',
        )
    if family.multiple_of_stages and microbatches % stages:
        raise refuse(
            f"{name} with microbatches={microbatches} on stages={stages}",
            rule="microbatches go through the chunks in groups of `stages`: microbatches is a multiple of it",
            fix=f"microbatches={-(-microbatches // stages) * stages}",
        )
    cells = family.ticks(stages, microbatches, chunks) * stages
    if cells > MAX_CELLS:
        raise refuse(
            f"{name} with stages={stages}, microbatches={microbatches}, chunks={chunks} has {cells} cells",
            rule=f"a table has at most {MAX_CELLS} cells",
            fix="fewer microbatches or stages",
        )
    return family.make(stages, microbatches, chunks)


LIBRARY: Mapping[str, ScheduleFamily] = {
    "gpipe": ScheduleFamily(
        description="all forwards, then all backwards",
        source="Huang et al. 2018, arXiv:1811.06965",
        make=gpipe,
        ticks=lambda P, M, v: 2 * (M + P - 1),
        peak=lambda P, M, v, d: M,
    ),
    "1f1b": ScheduleFamily(
        description="each stage alternates as soon as it can: fewest saved activations",
        source="PipeDream-Flush: Narayanan et al. 2020, arXiv:2006.09503",
        make=one_f_one_b,
        ticks=lambda P, M, v: 2 * (M + P - 1),
        peak=lambda P, M, v, d: min(M, P - d),
    ),
    "1f1b_phased": ScheduleFamily(
        description="1f1b that starts forwards early enough for all stages to go forward, or backward, together",
        source="eager 1F1B: Zhuang et al. 2022, arXiv:2211.05322",
        make=lambda P, M, v: phased("1f1b_phased", P, M, 1),
        ticks=lambda P, M, v: 2 * (M + P - 1),
        peak=lambda P, M, v, d: min(M, warmup_forwards(P, 1, d)),
    ),
    "interleaved": ScheduleFamily(
        description="1f1b over several chunks per stage: the bubble is 1/chunks, messages are chunks times as many",
        source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2",
        make=interleaved,
        ticks=lambda P, M, v: 2 * (M * v + P - 1),
        peak=lambda P, M, v, d: min(M * v, warmup_forwards(P, v, d)),
        chunks=ANY,
        multiple_of_stages=True,
    ),
    "interleaved_phased": ScheduleFamily(
        description="interleaved, with all stages going forward, or backward, together; keeps no more than interleaved",
        source="order of Narayanan et al. 2021, arXiv:2104.04473; ticks as in 1f1b_phased",
        make=lambda P, M, v: phased("interleaved_phased", P, M, v),
        ticks=lambda P, M, v: 2 * (M * v + P - 1),
        peak=lambda P, M, v, d: min(M * v, warmup_forwards(P, v, d)),
        chunks=ANY,
        multiple_of_stages=True,
    ),
    "looped_bfs": ScheduleFamily(
        description="all microbatches through a chunk, then through the next: each chunk's weights are gathered once",
        source="breadth-first: Lamy-Poirier 2022, arXiv:2211.05953",
        make=looped_bfs,
        ticks=lambda P, M, v: 2 * ((v - 1) * max(M, P) + M + P - 1),
        peak=lambda P, M, v, d: M * v,
        chunks=range(1, ANY.stop),
    ),
    "zb_h1": ScheduleFamily(
        description="1f1b with weight gradients in the bubble; every stage saves as much as the first stage of 1f1b",
        source="Qi et al. 2023, arXiv:2401.10241",
        make=zb_h1,
        ticks=lambda P, M, v: 2 * M + max(M, P) + P - 1,
        peak=lambda P, M, v, d: min(M, P),
        stash=lambda P, M, v, d: min(M, d + 1),
    ),
    "zb_h2": ScheduleFamily(
        description="no bubble between a stage's first and last op, for twice the activations",
        source="Qi et al. 2023, arXiv:2401.10241",
        make=zb_h2,
        ticks=lambda P, M, v: 3 * M + P - 1,
        peak=lambda P, M, v, d: 2 * P - 1,
        stash=lambda P, M, v, d: 2 * d + 1,
        fewest_microbatches=lambda P: 2 * P - 1,
    ),
    "zb_v": ScheduleFamily(
        description="no bubble between a stage's first and last op, for the activations of 1f1b: parts placed as a v",
        source="Qi et al. 2024, arXiv:2405.15362",
        make=zb_v,
        ticks=lambda P, M, v: 6 * M + P - 1,
        peak=lambda P, M, v, d: 2 * P,
        stash=lambda P, M, v, d: 2 * d + 1,
        chunks=range(2, 3),
        fewest_microbatches=lambda P: 2 * P - 1,
    ),
    "dualpipe_v": ScheduleFamily(
        description="forwards of one chunk overlap backwards of the other: parts placed as a v",
        source="DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; cut in half: github.com/deepseek-ai/DualPipe",
        make=dualpipe_v,
        ticks=lambda P, M, v: 6 * M + P - 1,
        peak=lambda P, M, v, d: 2 * P + 1,
        stash=lambda P, M, v, d: d + 1,
        chunks=range(2, 3),
        fewest_microbatches=lambda P: 2 * P,
    ),
}
