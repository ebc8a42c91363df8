"""Draws a table of thousands of cells as a small SVG file.

`draw.svg` gives every bar a tooltip; here all bars of one colour on a stage are one path, and their numbers are one
text. Of a table that is still too large, only the first ticks are drawn.
"""

from jaxpar.pipeline.draw.draw_schedule import BAR, ROW, describe_cut, op_names
from jaxpar.pipeline.draw.svg import (
    HATCH,
    LEFT,
    MAX_AXIS,
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
from jaxpar.pipeline.tables.schedule import Schedule

MAX_CELLS = 6000  # cells: about 200 kB


def overview(schedule: Schedule, times: OpTimes) -> str:
    """Returns an SVG file that shows the run of a table with a barrier after every tick.

    Args:
      schedule: The schedule to draw.
      times: The time of each op, in any one unit.
    """
    cost = price(schedule, times)
    lengths = [stop - start for start, stop in cost.starts.values()]
    shortest = max(min(lengths), max(lengths) / 8)
    ticks = _count_ticks(schedule, cost, shortest)
    sheet = Sheet.fit(cost.ticks[ticks], shortest, len(str(schedule.microbatches - 1)))
    part = "all ticks" if ticks == schedule.ticks else f"the first {ticks} of {schedule.ticks} ticks"
    words = f"{part}; as one program runs it, a tick ends when its slowest stage is done"
    rows = [_row(schedule, cost, stage, ticks, sheet, 84 + stage * ROW) for stage in range(schedule.stages)]
    bottom = 84 + schedule.stages * ROW
    nodes = [
        heading(schedule.name, describe_cut(schedule), 30, size=16),
        label(20, 50, words),
        _legend(schedule, 60),
        *rows,
        axis(cost.ticks[ticks], sheet, bottom),
    ]
    return document(f"{schedule.name}: {describe_cut(schedule)}", sheet, bottom + 28, nodes)


def _count_ticks(schedule: Schedule, cost: Price, shortest: float) -> int:
    """Returns the number of ticks to draw: all, or as many as the width allows with readable numbers."""
    if sum(1 for _ in schedule) <= MAX_CELLS:
        return schedule.ticks
    end = MAX_AXIS / (text_width("0" * len(str(schedule.microbatches - 1)), 8) + 2.5) * shortest
    return max(1, sum(begin <= end for begin in cost.ticks[1:]))


def _legend(schedule: Schedule, y: float) -> str:
    x, nodes = 20.0, []
    for op, words in op_names(schedule).items():
        chunks = schedule.chunks
        for chunk in range(0, chunks, -(-chunks // 8)):
            box = f'x="{format_length(x)}" y="{format_length(y)}" width="12" height="12" rx="2"'
            nodes.append(f'<rect {box} fill="{shade(op, chunk, chunks)}"/>')
            x += 13
        nodes.append(label(x + 4, y + 10, words))
        x += text_width(words, 12) + 20
    nodes.append(
        f'<g class="jx-hatch"><rect x="{format_length(x)}" y="{format_length(y)}" width="12" height="12" {HATCH}/></g>'
    )
    return "".join([*nodes, label(x + 17, y + 10, "idle" + "; paler: later chunks" * (schedule.chunks > 1))])


def _row(schedule: Schedule, cost: Price, stage: int, ticks: int, sheet: Sheet, y: float) -> str:
    """Draws the cells of a stage: one path per colour, one text per text colour."""
    end = cost.ticks[ticks]
    box = f'x="{LEFT}" y="{format_length(y)}" width="{format_length(end * sheet.rate)}" height="{BAR}"'
    nodes = [
        label(LEFT - 10, y + 16.5, f"stage {stage}", anchor="end"),
        f'<rect {box} class="jx-idle"/><rect {box} {HATCH}/>',
    ]
    paths: dict[str, list[str]] = {}
    numbers: dict[str, list[tuple[str, float]]] = {}
    for tick, row in enumerate(schedule.cells[:ticks]):
        cell = row[stage]
        if cell is None:
            continue
        start, stop = cost.starts[tick, stage]
        room, x = (stop - start) * sheet.rate, sheet.x(cost.ticks[tick])
        colour, number = shade(cell.op, cell.chunk, schedule.chunks), str(cell.microbatch)
        gap = min(1.0, room / 6)
        paths.setdefault(colour, []).append(f"M{x:.1f} {format_length(y)}h{room - gap:.1f}v{BAR}h-{room - gap:.1f}z")
        if text_width(str(schedule.microbatches - 1), sheet.size) + 1 <= room:
            first = x + (room - gap - text_width(number, sheet.size)) / 2
            items = [(digit, first + (i + 0.5) * text_width("0", sheet.size)) for i, digit in enumerate(number)]
            numbers.setdefault(ink(colour), []).extend(items)
    nodes += [f'<path d="{"".join(items)}" fill="{colour}"/>' for colour, items in paths.items()]
    for colour, digits in numbers.items():
        xs = " ".join(f"{x:.1f}" for _, x in digits)
        font = f'font-size="{sheet.size:.3g}" fill="{colour}" text-anchor="middle"'
        text = "".join(digit for digit, _ in digits)
        nodes.append(f'<text x="{xs}" y="{format_length(y + BAR / 2 + 0.36 * sheet.size)}" {font}>{text}</text>')
    return "".join(nodes)
