"""The pipeline in a report: its tick table, which is exact, and its messages in the compiled program."""

from collections.abc import Sequence
from typing import Any

from jaxpar.hlo.attribution import STAGE_TO_STAGE
from jaxpar.html.markup import Markup, badge, join, tag
from jaxpar.mesh.collective import Collective
from jaxpar.pipeline.draw.draw_schedule import count_noun, describe_cut, svg
from jaxpar.pipeline.draw.thumbnail import overview
from jaxpar.pipeline.tables.price import OpTimes, price
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.units import show_bytes

_TOLD = 300  # cells: bars of larger tables have no tooltips, to limit the size of the page


def messages(ledger: Sequence[Collective]) -> list[Collective]:
    """The collectives that send activations and their gradients from stage to stage."""
    return [entry for entry in ledger if entry.cause == STAGE_TO_STAGE]


def facts(schedule: Schedule, ledger: Sequence[Collective]) -> dict[str, Any]:
    """The facts about a pipeline, as values for JSON.

    `bubble` is the share of idle cells; `bubble_in_time` is the share of idle time if a backward takes twice as long as
    a forward, and a barrier follows every tick; `kept` is the number of saved (microbatch, chunk) pairs on each stage;
    `permutes` is the number of permutes in a step, of at most `largest` bytes each; `wire` is the number of bytes that
    a device sends in all permutes of a step.
    """
    permutes = messages(ledger)
    is_countable = all(entry.times is not None for entry in permutes)
    return {
        "schedule": schedule.name,
        **{key: getattr(schedule, key) for key in ("stages", "microbatches", "chunks", "placement")},
        "ticks": schedule.ticks,
        "phased": schedule.phased,
        "bubble": schedule.bubble,
        "bubble_in_time": price(schedule, OpTimes()).barrier_bubble,
        "kept": list(schedule.peak),
        "messages": schedule.messages,
        "permutes": sum(entry.times or 0 for entry in permutes) if is_countable else None,
        "largest": max([entry.payload for entry in permutes], default=0),
        "wire": sum(entry.step_wire for entry in permutes),
    }


def sentences(schedule: Schedule, ledger: Sequence[Collective]) -> list[tuple[str, str]]:
    """Returns (sentence, provenance) pairs about the tick table, its saved activations and its messages."""
    values = facts(schedule, ledger)
    table = (
        f"{schedule.name}, {describe_cut(schedule)}: {count_noun(schedule.ticks, 'tick')}, "
        f"{schedule.bubble:.1%} of the cells idle"
    )
    if abs(values["bubble_in_time"] - schedule.bubble) > 5e-4:
        table += f", {values['bubble_in_time']:.1%} of the time where a backward takes as long as two forwards"
    peak = max(schedule.peak)
    # stages of different programs send arrays of bytes, and choose their program by a branch in every tick
    branches = any(entry.kind == "collective-permute" and entry.dtype == "u8" for entry in ledger)
    memory = (
        f"a stage stores activations of at most {peak / schedule.chunks:.3g} of "
        f"{count_noun(schedule.microbatches, 'microbatch')} for their backward (stage "
        f"{schedule.peak.index(peak)}); idle, it "
        + ("computes anyway and discards the result: no conditional" if schedule.phased and not branches else "waits")
    )
    times = "?" if values["permutes"] is None else values["permutes"]
    traffic = f"{count_noun(schedule.messages, 'message')} from stage to stage: " + (
        f"{times} permutes of {show_bytes(values['largest'])}, in which a device sends {show_bytes(values['wire'])}"
        if values["permutes"] != 0
        else "the program has no such permute"
    )
    return [(table, "exact"), (memory, "exact"), (traffic, "compiled")]


def section(schedule: Schedule, ledger: Sequence[Collective]) -> Markup:
    """The part of a page about a pipeline: sentences, and a picture of its tick table."""
    items = [tag("li", words, " ", badge(provenance)) for words, provenance in sentences(schedule, ledger)]
    look = "jx-scroll jx-fit" if _cells(schedule) <= _TOLD else "jx-scroll"
    frame = tag("div", picture(schedule), cls=look, role="region", tabindex="0", aria_label="Schedule")
    return join([tag("ul", *items), frame])


def picture(schedule: Schedule) -> Markup:
    """Draws the tick table as SVG inside HTML, which is small even for a large table."""
    image = svg(schedule, OpTimes()) if _cells(schedule) <= _TOLD else overview(schedule, OpTimes())
    return Markup(image.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1).strip())


def _cells(schedule: Schedule) -> int:
    """Returns the number of ops in the tick table."""
    return sum(1 for _ in schedule)
