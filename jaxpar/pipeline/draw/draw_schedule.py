"""Draws a schedule: coloured text for a terminal, and an SVG to scale.

    ideal      every op starts when its input has arrived       the least time that the order of the ops allows
    as run     every tick ends when its slowest stage ends      the time of one program on all stages
    memory     activations that each stage saves, over time     in the run above it

The drawing is one file without a script. It follows the reader's light or dark theme, and a notebook's own. The colours
of F, B and W differ in lightness as well as in hue; the tooltip of a bar names its op, tick and time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from jaxpar.errors import refuse
from jaxpar.pipeline.draw.svg import (
    HATCH,
    LEFT,
    Sheet,
    axis,
    document,
    format_length,
    heading,
    ink,
    label,
    shade,
    text_width,
)
from jaxpar.pipeline.tables.price import OpTimes, Price, price
from jaxpar.pipeline.tables.schedule import Cell, Schedule

PALETTE = {"F": (25, 75, 117, 153), "B": (208, 215, 222, 230), "W": (29, 78, 115, 158)}  # of 256: by chunk
ROW, BAR, CURVE, GAP = 28, 24, 24, 8  # pixels of a stage: row of bars, bar; curve, space between curves

Spans = Mapping[tuple[int, int], tuple[float, float]]  # (tick, stage) to the (start, end) of its cell


# TERMINAL


def terminal(schedule: Schedule, *, colour: bool, width: int | None = None) -> str:
    """Returns the table as text: a row per stage, a column per tick.

    Args:
      schedule: The schedule to show.
      colour: Whether to colour F, B and W, later chunks paler.
      width: Columns of the terminal, None for no limit. A wider table wraps; coloured cells then omit the op.
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
    texts = []
    for first in range(0, schedule.ticks, fit):
        rows = schedule.cells[first : first + fit]
        band = [f"ticks {first} to {first + len(rows) - 1}"] if fit < schedule.ticks else []
        for stage in range(schedule.stages):
            cells = [_tile(row[stage], words, size, colour=colour) for row in rows]
            band.append(f"{f'stage {stage}':<{len(lead)}}" + " ".join(cells))
        texts.append("\n".join(band))
    return "\n\n".join(texts)


def _tile(cell: Cell | None, words: Mapping[Cell, str], size: int, *, colour: bool) -> str:
    if cell is None:
        return f"\033[2m{'.':>{size}}\033[0m" if colour else f"{'.':>{size}}"
    text = f"{words[cell]:>{size}}"
    if not colour:
        return text
    ink = 231 if cell.chunk == 0 and cell.op != "B" else 16
    return f"\033[38;5;{ink};48;5;{PALETTE[cell.op][min(cell.chunk, 3)]}m{text}\033[0m"


def legend(schedule: Schedule, *, colour: bool) -> str:
    """Returns a one-line legend of the table."""
    items = [
        f"{_tile(Cell(op, 0), {Cell(op, 0): op}, 1, colour=colour)} {text}" for op, text in op_names(schedule).items()
    ]
    if schedule.chunks > 1:
        items.append("paler: later chunks" if colour else "'1 chunk 1")
    return "  ".join([*items, ". idle"])


def op_names(schedule: Schedule) -> dict[str, str]:
    """Returns the letter and the description of each op of a schedule."""
    if schedule.split:
        return {"F": "forward", "B": "backward of inputs", "W": "backward of weights"}
    return {"F": "forward", "B": "backward"}


# DRAWING


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run of a schedule: its name, the rule for the start of ops, the times of ops, the end, and the idle share."""

    name: str
    rule: str
    spans: Spans
    end: float
    bubble: float


def svg(schedule: Schedule, times: OpTimes) -> str:
    """Returns an SVG file that shows both runs and the saved activations.

    Args:
      schedule: The schedule to draw.
      times: The time of each op and each message, in any one unit.

    Raises:
      JaxparError: If all times are 0, or one is infinite.
    """
    cost = price(schedule, times)
    if not any(cost.work) or cost.barrier == inf:
        raise refuse(
            f"times {times}",
            rule="in a drawing to scale at least one op takes time, and all times are finite",
            fix="Times(forward=1.0)",
        )
    runs = timed_runs(cost)
    lengths = [stop - start for start, stop in cost.starts.values()]
    shortest = max(min(lengths), max(lengths) / 8)  # the numbers in shorter bars need not be readable
    sheet = Sheet.fit(max(cost.barrier, cost.asynchronous), shortest, len(str(schedule.microbatches - 1)))
    nodes, y = [_head(schedule, cost, sheet), _legend(schedule, cost, times)], 128
    for run in runs:
        nodes.append(_rows(schedule, run, sheet, y))
        if run is runs[-1]:
            lines = "".join(
                f"M{format_length(sheet.x(time))} {y + 12}v{schedule.stages * ROW}" for time in cost.ticks[1:]
            )
            nodes.append(f'<path d="{lines}" class="jx-rule" stroke-width=".75" stroke-dasharray="2 2" fill="none"/>')
        y += schedule.stages * ROW + 68
    nodes.append(_memory(schedule, runs[-1], sheet, y))
    return document(
        f"{schedule.name}: {describe_cut(schedule)}", sheet, y + schedule.stages * (CURVE + GAP) + 48, nodes
    )


def timed_runs(cost: Price) -> list[TimedRun]:
    """Returns the ideal run and the run with barriers, or one of them if they are equal."""
    begin = cost.ticks
    spans = {cell: (begin[cell[0]], begin[cell[0]] + stop - start) for cell, (start, stop) in cost.starts.items()}
    if all(abs(spans[cell][0] - start) <= 1e-9 * cost.barrier for cell, (start, _) in cost.starts.items()):
        rule = "no stage waits for a slower one"
        return [TimedRun("ideal, and as one program runs it", rule, spans, cost.barrier, cost.barrier_bubble)]
    rule = "every op starts as soon as its input is there"
    ideal = TimedRun("ideal", rule, cost.starts, cost.asynchronous, cost.asynchronous_bubble)
    rule = "a tick ends when its slowest stage is done"
    return [ideal, TimedRun("as one program runs it", rule, spans, cost.barrier, cost.barrier_bubble)]


def saved_activations(schedule: Schedule, spans: Spans, stage: int) -> list[tuple[float, int]]:
    """Returns (time, count) at every change of a stage's saved activations, counted as in `Schedule.peak`."""
    last, changes = "W" if schedule.split else "B", []
    for tick, cell_stage, cell in schedule:
        start, stop = spans[tick, cell_stage]
        if cell_stage == stage and cell.op in ("F", last):
            changes.append((start, 1) if cell.op == "F" else (stop, -1))
    count, counts = 0, []
    for time, change in changes:  # a stage's ops are in the order of time
        count += change
        if counts and time - counts[-1][0] <= 1e-9 * time:  # freed as another is saved: one point
            counts.pop()
        counts.append((time, count))
    return counts


def describe_cut(schedule: Schedule) -> str:
    """Returns the numbers of stages, chunks and microbatches, in words."""
    chunks = f", {schedule.chunks} chunks each" if schedule.chunks > 1 else ""
    return f"{count_noun(schedule.stages, 'stage')}{chunks}, {count_noun(schedule.microbatches, 'microbatch')}"


def count_noun(count: int, noun: str) -> str:
    """Returns a count with its noun.

    >>> count_noun(1, "message"), count_noun(2, "microbatch")
    ('1 message', '2 microbatches')
    """
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def _head(schedule: Schedule, cost: Price, sheet: Sheet) -> str:
    room = max(12, int(sheet.width / 12 - 36))
    name = schedule.name if len(schedule.name) <= room else schedule.name[: room - 1] + "…"
    words = f"bubble {cost.asynchronous_bubble:.1%} ideal, {cost.barrier_bubble:.1%} as one program runs it"
    counts = f"{count_noun(schedule.ticks, 'tick')} · {count_noun(schedule.messages, 'message')}"
    return heading(name, describe_cut(schedule), 36, size=20) + label(20, 60, f"{words} · {counts}", size=13)


def _legend(schedule: Schedule, cost: Price, times: OpTimes) -> str:
    """Returns the legend of the colours, with each op's time."""
    op_lengths: dict[str, list[float]] = {op: [] for op in op_names(schedule)}
    for tick, stage, cell in schedule:
        start, stop = cost.starts[tick, stage]
        op_lengths[cell.op].append(stop - start)
    chunks, x, nodes = schedule.chunks, 20.0, []
    for op, lengths in op_lengths.items():
        for chunk in range(0, chunks, -(-chunks // 8)):
            box = f'x="{format_length(x)}" y="80" width="16" height="14" rx="2"'
            nodes.append(f'<rect {box} fill="{shade(op, chunk, chunks)}"/>')
            x += 17
        low, high = f"{min(lengths):.4g}", f"{max(lengths):.4g}"
        words = f"{op_names(schedule)[op]} takes {low if low == high else f'{low} to {high}'}"
        nodes.append(label(x + 4, 91.5, words))
        x += text_width(words, 12) + 20
    nodes.append(f'<g class="jx-hatch"><rect x="{format_length(x)}" y="80" width="16" height="14" {HATCH}/></g>')
    words = " · ".join(["idle", *(["paler: later chunks"] if chunks > 1 else []),
                        *([f"a message takes {times.send:.4g}"] if times.send else [])])  # fmt: skip
    return "".join([*nodes, label(x + 21, 91.5, words)])


def _rows(schedule: Schedule, run: TimedRun, sheet: Sheet, y: float) -> str:
    """Returns a row of bars per stage, with a title above and a time axis below."""
    nodes = [heading(run.name, f"{run.rule}: takes {run.end:.4g}, {run.bubble:.1%} of it idle", y)]
    for stage in range(schedule.stages):
        top = y + 14 + stage * ROW
        box = f'x="{LEFT}" y="{format_length(top)}" width="{format_length(run.end * sheet.rate)}" height="{BAR}"'
        nodes.append(label(LEFT - 10, top + 16.5, f"stage {stage}", anchor="end"))
        nodes.append(f'<rect {box} class="jx-idle"/><rect {box} {HATCH}/>')
    font = f'font-size="{sheet.size:.3g}" stroke-width="{format_length(min(1.0, sheet.shortest / 6))}"'
    nodes.append(f'<g class="jx-cells {"jx-ideal" if run.name == "ideal" else "jx-run"}" text-anchor="middle" {font}>')
    for tick, stage, cell in schedule:
        colour, position = shade(cell.op, cell.chunk, schedule.chunks), f"stage {stage}, tick {tick}"
        nodes.append(_bar(cell, colour, position, run.spans[tick, stage], sheet, y + 14 + stage * ROW))
    return "".join([*nodes, "</g>", axis(run.end, sheet, y + 14 + schedule.stages * ROW)])


def _bar(cell: Cell, colour: str, position: str, span: tuple[float, float], sheet: Sheet, y: float) -> str:
    """Draws an op's bar with its microbatch's number: upright if it fits, else rotated, else only in the tooltip."""
    (start, stop), number, size = span, str(cell.microbatch), sheet.size
    room = (stop - start) * sheet.rate
    x, middle = sheet.x(start) + room / 2, y + BAR / 2
    text = ""
    if text_width(number, size) + 1.5 <= room:
        text = (
            f'<text x="{format_length(x)}" y="{format_length(middle + 0.36 * size)}" '
            f'fill="{ink(colour)}">{number}</text>'
        )
    elif 0.75 * size + 1.5 <= room:
        rotation = f'transform="translate({format_length(x + 0.36 * size)} {format_length(middle)}) rotate(-90)"'
        text = f'<text {rotation} fill="{ink(colour)}">{number}</text>'
    box = (
        f'x="{format_length(sheet.x(start))}" y="{format_length(y)}" width="{format_length(room)}" '
        f'height="{BAR}" rx="2"'
    )
    if room < 3:
        box += ' stroke-width="0"'
    tip = f"<title>{cell}, {position}: {start:.5g} to {stop:.5g}</title>"
    return f'<rect {box} fill="{colour}">{tip}</rect>{text}'


def _memory(schedule: Schedule, run: TimedRun, sheet: Sheet, y: float) -> str:
    """Draws a curve per stage: its saved activations over time, in microbatches."""
    max_peak = max(schedule.peak)
    maximum = f"{max_peak / schedule.chunks:.3g} of {count_noun(schedule.microbatches, 'microbatch')}"
    nodes = [heading("activations kept", f"at most {maximum}, on stage {schedule.peak.index(max_peak)}", y)]
    for stage, peak in enumerate(schedule.peak):
        base, curve = y + 14 + stage * (CURVE + GAP) + CURVE, saved_activations(schedule, run.spans, stage)
        steps = "".join(
            f"H{format_length(sheet.x(time))}V{format_length(base - CURVE * count / max_peak)}" for time, count in curve
        )
        line, end = f"M{LEFT} {format_length(base)}{steps}H{format_length(sheet.x(run.end))}", sheet.x(run.end)
        highest, first = max((count, -time) for time, count in curve)
        nodes += [
            label(LEFT - 10, base - 7, f"stage {stage}", anchor="end"),
            f'<path d="{line}V{format_length(base)}Z" class="jx-kept"/>',
            f'<path d="{line}" class="jx-curve" stroke-width="1.5" fill="none"/>',
            f'<circle cx="{format_length(sheet.x(-first))}" '
            f'cy="{format_length(base - CURVE * highest / max_peak)}" r="3" class="jx-peak"/>',
            label(end + 10, base - 7, f"peak {peak / schedule.chunks:.3g}"),
        ]
    return "".join([*nodes, axis(run.end, sheet, y + 10 + schedule.stages * (CURVE + GAP))])
