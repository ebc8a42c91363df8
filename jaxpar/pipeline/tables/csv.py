"""Reads and writes schedules as CSV, so that users can bring their own.

    1f1b,stages=2,microbatches=2,chunks=1,placement=ring
    F0,F1,.,B0,.,B1
    .,F0,B0,F1,B1,.

After the header: one line per stage, one cell per tick. F0, B0 and W0 are forward, backward and weight gradient of
microbatch 0; F0'1 is the forward on chunk 1; a . or an empty cell is idle. A name with a comma is in quotes.
"""

import csv
import io
import re
from pathlib import Path

from jaxpar.errors import refuse
from jaxpar.pipeline.tables.schedule import OPS, Cell, Schedule

NUMBER = "([0-9]{1,9})"
HEAD = re.compile(f"stages={NUMBER},microbatches={NUMBER},chunks={NUMBER},placement=(ring|v)")
CELL = re.compile(f"([{''.join(OPS)}]){NUMBER}(?:'{NUMBER})?")
HEADER = "1f1b,stages=2,microbatches=4,chunks=1,placement=ring"


def to_csv(schedule: Schedule) -> str:
    name = schedule.name
    if re.search('[",\r\n]', name):
        name = '"' + name.replace('"', '""') + '"'
    head = ",".join(f"{key}={getattr(schedule, key)}" for key in ("stages", "microbatches", "chunks", "placement"))
    lines = [",".join(str(row[stage] or ".") for row in schedule.cells) for stage in range(schedule.stages)]
    return "\n".join([f"{name},{head}", *lines, ""])


def read_table(path: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """Reads the schedule in a file for declared numbers, of which 0 stands for what the file says.

    Raises:
      JaxparError: If the file cannot be read or parsed, or has other numbers.
    """
    try:
        table = from_csv(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(
            f"parallel.pipeline.schedule = {path!r}: {getattr(error, 'strerror', error)}",
            rule="a schedule is a name of the library, or a CSV file",
            fix='schedule = "1f1b_phased"; `jaxpar schedule 1f1b --stages 4 --microbatches 8 --csv F` writes one',
        ) from error
    for key, declared, fixed in (
        ("pipe", stages, table.stages),
        ("microbatches", microbatches, table.microbatches),
        ("chunks", chunks, table.chunks),
    ):
        if declared and declared != fixed:
            raise refuse(
                f"{key} = {declared}, the table in {path} has {fixed}",
                rule="a CSV schedule fixes its numbers of stages, microbatches and chunks: the job has the same",
                fix=f"{key} = {fixed}",
            )
    return table


def from_csv(text: str) -> Schedule:
    """Parses a schedule.

    Raises:
      JaxparError: If a cell cannot be parsed or cannot run; the message has its line or its tick and stage.
    """
    lines = _lines(text)
    number, first = lines[0] if lines else (1, [])
    head = HEAD.fullmatch(",".join(field.strip() for field in first[1:]))
    if not head:
        raise refuse(
            f"line {number}: {_shorten(','.join(first))}",
            rule="the first line is a header: a name, and how the model and the batch are cut",
            fix=HEADER,
        )
    stages, microbatches, chunks = (int(number) for number in head.groups()[:3])
    if len(lines) - 1 != stages or not stages:
        raise refuse(
            f"{len(lines) - 1} lines after the header, which says stages={stages}",
            rule="one line for every stage",
            fix=f"stages={max(len(lines) - 1, 1)}",
        )
    ticks = len(lines[1][1])
    for number, cells in lines[1:]:
        if len(cells) != ticks:
            raise refuse(
                f"line {number} has {len(cells)} cells, line {lines[1][0]} has {ticks}",
                rule="every stage has one cell for every tick",
                fix="a . where the stage idles",
            )
    columns = [[_cell(cell, f"line {n}, cell {i}") for i, cell in enumerate(cells, 1)] for n, cells in lines[1:]]
    return Schedule(
        name=first[0],
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        placement="v" if head[4] == "v" else "ring",
        cells=tuple(zip(*columns, strict=True)),
    )


def _lines(text: str) -> list[tuple[int, list[str]]]:
    """Returns (line number, cells) of each line that is not empty."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise refuse(f"line {reader.line_num}: {error}", rule="a schedule is written as CSV", fix=HEADER) from error


def _cell(text: str, position: str) -> Cell | None:
    if text.strip() in ("", "."):
        return None
    match = CELL.fullmatch(text.strip())
    if not match:
        raise refuse(
            f"{position}: {_shorten(text)}",
            rule="a cell is F, B or W, a microbatch, and for a later chunk ' and its number",
            fix="F0, B3'1, or . where the stage idles",
        )
    return Cell(match[1], int(match[2]), int(match[3] or 0))


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
