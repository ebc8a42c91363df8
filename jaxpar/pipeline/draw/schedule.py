"""A schedule as a person reads it: coloured text for a terminal, and a drawing to scale.

    ideal      every op starts when its input has arrived       the least time the order of the ops allows
    as run     every tick ends when its slowest stage does      what one program on all stages takes
    memory     activations each stage keeps, as time passes     of the run above

The drawing is one file without a script. It follows the reader's light or dark theme, and a notebook's own. The colours
of F, B and W differ in lightness as well as in hue; under the pointer, a bar tells its op, tick and time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from jaxpar.errors import refuse
from jaxpar.pipeline.draw.svg import HATCH, LEFT, Sheet, axis, document, heading, ink, label, n, shade, wide
from jaxpar.pipeline.tables.price import Price, Times, price
from jaxpar.pipeline.tables.schedule import Cell, Schedule

PALETTE = {"F": (25, 75, 117, 153), "B": (208, 215, 222, 230), "W": (29, 78, 115, 158)}  # of 256: by chunk
ROW, BAR, CURVE, GAP = 28, 24, 24, 8  # pixels of a stage: its row of bars, a bar; its curve, and what is between

Spans = Mapping[tuple[int, int], tuple[float, float]]  # (tick, stage) to when its cell starts and ends


# TERMINAL


def terminal(schedule: Schedule, *, colour: bool, width: int | None = None) -> str:
    """Returns the table, one row a stage, one column a tick.

    Args:
      schedule: The schedule to show.
      colour: Whether to colour F, B and W, later chunks paler.
      width: Columns there are; a wider table drops what its colours say as well, and continues below. None for any.
    """
    lead = f"stage {schedule.stages - 1}  "
    room = (width or 10**9) - len(lead)
    words = {cell: str(cell) for _, _, cell in schedule}
    size = max(map(len, words.values()))
    if colour and schedule.chunks <= len(PALETTE["F"]) and schedule.ticks * (size + 1) > room:
        words = {cell: str(cell.microbatch) for cell in words}
        size = max(map(len, words.values()))
    bands = -(-schedule.ticks // max(1, room // (size + 1)))
    fit = -(-schedule.ticks // bands)
    shown = []
    for first in range(0, schedule.ticks, fit):
        rows = schedule.cells[first : first + fit]
        band = [f"ticks {first} to {first + len(rows) - 1}"] if fit < schedule.ticks else []
        for stage in range(schedule.stages):
            cells = [_tile(row[stage], words, size, colour=colour) for row in rows]
            band.append(f"{f'stage {stage}':<{len(lead)}}" + " ".join(cells))
        shown.append("\n".join(band))
    return "\n\n".join(shown)


def _tile(cell: Cell | None, words: Mapping[Cell, str], size: int, *, colour: bool) -> str:
    if cell is None:
        return f"\033[2m{'.':>{size}}\033[0m" if colour else f"{'.':>{size}}"
    text = f"{words[cell]:>{size}}"
    if not colour:
        return text
    ink = 231 if cell.chunk == 0 and cell.op != "B" else 16
    return f"\033[38;5;{ink};48;5;{PALETTE[cell.op][min(cell.chunk, 3)]}m{text}\033[0m"


def legend(schedule: Schedule, *, colour: bool) -> str:
    """Returns the legend of the table's signs, in one line."""
    meant = [f"{_tile(Cell(op, 0), {Cell(op, 0): op}, 1, colour=colour)} {what}" for op, what in ops(schedule).items()]
    if schedule.chunks > 1:
        meant.append("paler: later chunks" if colour else "'1 chunk 1")
    return "  ".join([*meant, ". idle"])


def ops(schedule: Schedule) -> dict[str, str]:
    """Returns the ops of a schedule, in words."""
    if schedule.split:
        return {"F": "forward", "B": "backward of inputs", "W": "backward of weights"}
    return {"F": "forward", "B": "backward"}


# DRAWING


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a schedule: its name, what decides when an op starts, when each did, when all were done, what idled."""

    name: str
    rule: str
    spans: Spans
    end: float
    bubble: float


def svg(schedule: Schedule, times: Times) -> str:
    """Returns a drawing of both runs and of the activations kept, as one SVG file.

    Args:
      schedule: The schedule to draw.
      times: How long each op and each message takes, in any one unit.

    Raises:
      JaxparError: If nothing takes any time.
    """
    cost = price(schedule, times)
    if not any(cost.work) or cost.barrier == inf:
        raise refuse(
            f"times {times}",
            rule="in a drawing to scale at least one op takes time, and all times are finite",
            fix="Times(forward=1.0)",
        )
    shown = runs(cost)
    lengths = [stop - start for start, stop in cost.starts.values()]
    shortest = max(min(lengths), max(lengths) / 8)  # what is shorter yet need not be read
    sheet = Sheet.fit(max(cost.barrier, cost.asynchronous), shortest, len(str(schedule.microbatches - 1)))
    drawn, y = [_head(schedule, cost, sheet), _legend(schedule, cost, times)], 128
    for run in shown:
        drawn.append(_rows(schedule, run, sheet, y))
        if run is shown[-1]:
            lines = "".join(f"M{n(sheet.x(time))} {y + 12}v{schedule.stages * ROW}" for time in cost.ticks[1:])
            drawn.append(f'<path d="{lines}" class="jx-rule" stroke-width=".75" stroke-dasharray="2 2" fill="none"/>')
        y += schedule.stages * ROW + 68
    drawn.append(_memory(schedule, shown[-1], sheet, y))
    return document(f"{schedule.name}: {cut(schedule)}", sheet, y + schedule.stages * (CURVE + GAP) + 48, drawn)


def runs(cost: Price) -> list[Run]:
    """Returns the ideal run and the one with barriers, in that order; one for both where they are the same."""
    begin = cost.ticks
    spans = {at: (begin[at[0]], begin[at[0]] + stop - start) for at, (start, stop) in cost.starts.items()}
    if all(abs(spans[at][0] - start) <= 1e-9 * cost.barrier for at, (start, _) in cost.starts.items()):
        rule = "no stage waits for a slower one"
        return [Run("ideal, and as one program runs it", rule, spans, cost.barrier, cost.barrier_bubble)]
    rule = "every op starts as soon as its input is there"
    ideal = Run("ideal", rule, cost.starts, cost.asynchronous, cost.asynchronous_bubble)
    rule = "a tick ends when its slowest stage is done"
    return [ideal, Run("as one program runs it", rule, spans, cost.barrier, cost.barrier_bubble)]


def kept(schedule: Schedule, spans: Spans, stage: int) -> list[tuple[float, int]]:
    """Returns (time, count) at every change of the activations that a stage keeps, counted as `Schedule.peak` does."""
    last, changes = "W" if schedule.split else "B", []
    for tick, at, cell in schedule:
        start, stop = spans[tick, at]
        if at == stage and cell.op in ("F", last):
            changes.append((start, 1) if cell.op == "F" else (stop, -1))
    count, found = 0, []
    for time, change in changes:  # a stage's ops are in the order of time
        count += change
        if found and time - found[-1][0] <= 1e-9 * time:  # one leaves as another comes
            found.pop()
        found.append((time, count))
    return found


def cut(schedule: Schedule) -> str:
    """Returns how a schedule cuts the model and the batch, in words."""
    chunks = f", {schedule.chunks} chunks each" if schedule.chunks > 1 else ""
    return f"{many(schedule.stages, 'stage')}{chunks}, {many(schedule.microbatches, 'microbatch')}"


def many(count: int, what: str) -> str:
    """Returns a count of things.

    >>> many(1, "message"), many(2, "microbatch")
    ('1 message', '2 microbatches')
    """
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def _head(schedule: Schedule, cost: Price, sheet: Sheet) -> str:
    room = max(12, int(sheet.width / 12 - 36))
    name = schedule.name if len(schedule.name) <= room else schedule.name[: room - 1] + "…"
    words = f"bubble {cost.asynchronous_bubble:.1%} ideal, {cost.barrier_bubble:.1%} as one program runs it"
    counts = f"{many(schedule.ticks, 'tick')} · {many(schedule.messages, 'message')}"
    return heading(name, cut(schedule), 36, size=20) + label(20, 60, f"{words} · {counts}", size=13)


def _legend(schedule: Schedule, cost: Price, times: Times) -> str:
    """Returns the legend of the colours, with the time of each op."""
    took: dict[str, list[float]] = {op: [] for op in ops(schedule)}
    for tick, stage, cell in schedule:
        start, stop = cost.starts[tick, stage]
        took[cell.op].append(stop - start)
    chunks, x, drawn = schedule.chunks, 20.0, []
    for op, lengths in took.items():
        for chunk in range(0, chunks, -(-chunks // 8)):
            place = f'x="{n(x)}" y="80" width="16" height="14" rx="2"'
            drawn.append(f'<rect {place} fill="{shade(op, chunk, chunks)}"/>')
            x += 17
        low, high = f"{min(lengths):.4g}", f"{max(lengths):.4g}"
        words = f"{ops(schedule)[op]} takes {low if low == high else f'{low} to {high}'}"
        drawn.append(label(x + 4, 91.5, words))
        x += wide(words, 12) + 20
    drawn.append(f'<g class="jx-hatch"><rect x="{n(x)}" y="80" width="16" height="14" {HATCH}/></g>')
    words = " · ".join(["idle", *(["paler: later chunks"] if chunks > 1 else []),
                        *([f"a message takes {times.send:.4g}"] if times.send else [])])  # fmt: skip
    return "".join([*drawn, label(x + 21, 91.5, words)])


def _rows(schedule: Schedule, run: Run, sheet: Sheet, y: float) -> str:
    """Returns one row of bars for each stage, with a title above and an axis of time below."""
    drawn = [heading(run.name, f"{run.rule}: takes {run.end:.4g}, {run.bubble:.1%} of it idle", y)]
    for stage in range(schedule.stages):
        at = y + 14 + stage * ROW
        place = f'x="{LEFT}" y="{n(at)}" width="{n(run.end * sheet.rate)}" height="{BAR}"'
        drawn.append(label(LEFT - 10, at + 16.5, f"stage {stage}", anchor="end"))
        drawn.append(f'<rect {place} class="jx-idle"/><rect {place} {HATCH}/>')
    look = f'font-size="{sheet.size:.3g}" stroke-width="{n(min(1.0, sheet.shortest / 6))}"'
    drawn.append(f'<g class="jx-cells {"jx-ideal" if run.name == "ideal" else "jx-run"}" text-anchor="middle" {look}>')
    for tick, stage, cell in schedule:
        colour, where = shade(cell.op, cell.chunk, schedule.chunks), f"stage {stage}, tick {tick}"
        drawn.append(_bar(cell, colour, where, run.spans[tick, stage], sheet, y + 14 + stage * ROW))
    return "".join([*drawn, "</g>", axis(run.end, sheet, y + 14 + schedule.stages * ROW)])


def _bar(cell: Cell, colour: str, where: str, span: tuple[float, float], sheet: Sheet, y: float) -> str:
    """Returns an op with its microbatch's number: upright where it fits, else turned, else left to the tooltip."""
    (start, stop), number, size = span, str(cell.microbatch), sheet.size
    room = (stop - start) * sheet.rate
    x, middle = sheet.x(start) + room / 2, y + BAR / 2
    text = ""
    if wide(number, size) + 1.5 <= room:
        text = f'<text x="{n(x)}" y="{n(middle + 0.36 * size)}" fill="{ink(colour)}">{number}</text>'
    elif 0.75 * size + 1.5 <= room:
        turned = f'transform="translate({n(x + 0.36 * size)} {n(middle)}) rotate(-90)"'
        text = f'<text {turned} fill="{ink(colour)}">{number}</text>'
    place = f'x="{n(sheet.x(start))}" y="{n(y)}" width="{n(room)}" height="{BAR}" rx="2"'
    if room < 3:
        place += ' stroke-width="0"'
    tip = f"<title>{cell}, {where}: {start:.5g} to {stop:.5g}</title>"
    return f'<rect {place} fill="{colour}">{tip}</rect>{text}'


def _memory(schedule: Schedule, run: Run, sheet: Sheet, y: float) -> str:
    """Returns a curve for each stage: microbatches' worth of its activations, over time."""
    most = max(schedule.peak)
    worth = f"{most / schedule.chunks:.3g} of {many(schedule.microbatches, 'microbatch')}"
    drawn = [heading("activations kept", f"at most {worth}, on stage {schedule.peak.index(most)}", y)]
    for stage, peak in enumerate(schedule.peak):
        base, curve = y + 14 + stage * (CURVE + GAP) + CURVE, kept(schedule, run.spans, stage)
        steps = "".join(f"H{n(sheet.x(time))}V{n(base - CURVE * count / most)}" for time, count in curve)
        line, end = f"M{LEFT} {n(base)}{steps}H{n(sheet.x(run.end))}", sheet.x(run.end)
        highest, first = max((count, -time) for time, count in curve)
        drawn += [
            label(LEFT - 10, base - 7, f"stage {stage}", anchor="end"),
            f'<path d="{line}V{n(base)}Z" class="jx-kept"/>',
            f'<path d="{line}" class="jx-curve" stroke-width="1.5" fill="none"/>',
            f'<circle cx="{n(sheet.x(-first))}" cy="{n(base - CURVE * highest / most)}" r="3" class="jx-peak"/>',
            label(end + 10, base - 7, f"peak {peak / schedule.chunks:.3g}"),
        ]
    return "".join([*drawn, axis(run.end, sheet, y + 10 + schedule.stages * (CURVE + GAP))])
