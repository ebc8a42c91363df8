"""The pipeline of a report: its table, which is exact, and its messages, as compiled."""

from collections.abc import Sequence
from typing import Any

from jaxpar.hlo.attribution import STAGE_TO_STAGE
from jaxpar.html.markup import Markup, badge, join, tag
from jaxpar.mesh.collective import Collective
from jaxpar.pipeline.draw.schedule import cut, many, svg
from jaxpar.pipeline.draw.thumbnail import overview
from jaxpar.pipeline.tables.price import Times, price
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.units import show_bytes

_TOLD = 300  # cells: in larger tables no bar tells of itself, for the size of the page


def messages(ledger: Sequence[Collective]) -> list[Collective]:
    """Returns the collectives that take activations and their gradients from stage to stage."""
    return [entry for entry in ledger if entry.cause == STAGE_TO_STAGE]


def facts(schedule: Schedule, ledger: Sequence[Collective]) -> dict[str, Any]:
    """Returns the facts about a pipeline, as values for JSON.

    `bubble` is the share of idle cells, `bubble_in_time` that of the time with a backward of two forwards and a barrier
    after every tick; `kept` counts (microbatch, chunk) pairs on each stage; of `permutes` there are so many in a step,
    each of at most `largest` bytes, and a device sends `wire` bytes in all of them.
    """
    sent = messages(ledger)
    known = all(entry.times is not None for entry in sent)
    return {
        "schedule": schedule.name,
        **schedule.cut._asdict(),
        "ticks": schedule.ticks,
        "phased": schedule.phased,
        "bubble": schedule.bubble,
        "bubble_in_time": price(schedule, Times()).barrier_bubble,
        "kept": list(schedule.peak),
        "messages": schedule.messages,
        "permutes": sum(entry.times or 0 for entry in sent) if known else None,
        "largest": max([entry.payload for entry in sent], default=0),
        "wire": sum(entry.step_wire for entry in sent),
    }


def sentences(schedule: Schedule, ledger: Sequence[Collective]) -> list[tuple[str, str]]:
    """Returns (sentence, provenance) about the table, the activations it keeps and the messages it sends."""
    known = facts(schedule, ledger)
    table = f"{schedule.name}, {cut(schedule)}: {many(schedule.ticks, 'tick')}, {schedule.bubble:.1%} of the cells idle"
    if abs(known["bubble_in_time"] - schedule.bubble) > 5e-4:
        table += f", {known['bubble_in_time']:.1%} of the time where a backward takes as long as two forwards"
    most = max(schedule.peak)
    kept = (
        f"a stage keeps at most {most / schedule.chunks:.3g} of {many(schedule.microbatches, 'microbatch')} for their "
        f"backward (stage {schedule.peak.index(most)}); where it idles it "
        + ("computes all the same, and throws that away: no conditional" if schedule.phased else "waits")
    )
    times = "?" if known["permutes"] is None else known["permutes"]
    sent = f"{many(schedule.messages, 'message')} from stage to stage: " + (
        f"{times} permutes of {show_bytes(known['largest'])}, in which a device sends {show_bytes(known['wire'])}"
        if known["permutes"] != 0
        else "no permute of the program is one"
    )
    return [(table, "exact"), (kept, "exact"), (sent, "compiled")]


def section(schedule: Schedule, ledger: Sequence[Collective]) -> Markup:
    """Returns the part of a page about a pipeline: sentences, and its table as a picture."""
    said = [tag("li", words, " ", badge(known)) for words, known in sentences(schedule, ledger)]
    look = "jx-scroll jx-fit" if _cells(schedule) <= _TOLD else "jx-scroll"
    frame = tag("div", picture(schedule), cls=look, role="region", tabindex="0", aria_label="Schedule")
    return join([tag("ul", *said), frame])


def picture(schedule: Schedule) -> Markup:
    """Returns the table as SVG inside of HTML, small enough to send whatever its size."""
    drawn = svg(schedule, Times()) if _cells(schedule) <= _TOLD else overview(schedule, Times())
    return Markup(drawn.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1).strip())


def _cells(schedule: Schedule) -> int:
    """Returns how many ops there are."""
    return schedule.ticks * schedule.stages - schedule.idle
