"""Summarizes a finished sweep: a table of its members, the best one, and the lineage of copies.

RUN/metrics.jsonl    loss/0, learning_rate/0, ... of each member, in every step; with pbt also from/0, ... at copies;
                     with evolution and swarm also score/0, ... at the end of a round
RUN/lineage.jsonl    with pbt, a line per copy: step, member, from, its settings before and after
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.exchange.population.sweep import ROOM, Sweep
from jaxpar.files import write_text

LINEAGE = "lineage.jsonl"
SCORES = ("eval_loss", "loss")  # members are ranked by the first available score


def summarize(folder: Path, sweep: Sweep) -> list[str]:
    """Writes the lineage of a pbt sweep, and returns its members as lines of a table, then the best one.

    Args:
      folder: The run folder.
      sweep: The sweep of the job.
    """
    with (folder / "metrics.jsonl").open() as file:
        rows = [json.loads(line) for line in file]
    if not rows:
        return []
    if sweep.method == "pbt":
        lines = [json.dumps(line) + "\n" for line in lineage(rows, sweep.values)]
        write_text(folder / LINEAGE, "".join(lines))
    return [*table(rows[-1], sweep), *best_rounds(rows, sweep)]


def best_rounds(rows: Sequence[Mapping[str, Any]], sweep: Sweep) -> list[str]:
    """Returns a line with the best settings of all finished rounds, [] if members do not train in rounds."""
    scores = [
        (score, number, member)
        for number, row in enumerate(rows)
        for member in range(sweep.count)
        if (score := row.get(f"score/{member}")) is not None
    ]
    if not scores:
        return []
    score, number, member = min(scores, key=lambda entry: _sort_key(entry[0]))
    settings = ", ".join(f"{ROOM}{name} = {rows[number - 1][f'{name}/{member}']:.4g}" for name in sweep.values)
    first = rows[number]["step"] - sweep.every
    return [f"best of the rounds before: loss {_format_loss(score)} in the round from step {first}, {settings}"]


def lineage(rows: Iterable[Mapping[str, Any]], values: Mapping[str, tuple[float, ...]]) -> Iterator[dict[str, Any]]:
    """Yields an entry for each time that a member is replaced by a copy of another one.

    Args:
      rows: Rows of metrics, from the first step on.
      values: Maps each setting to its initial values, one per member.
    """
    members = range(len(next(iter(values.values()))))
    current = [{name: member_values[member] for name, member_values in values.items()} for member in members]
    for row in rows:
        previous, current = current, [{name: row[f"{name}/{member}"] for name in values} for member in members]
        for member in members:
            origin = row.get(f"from/{member}", member)
            if origin != member:
                yield {
                    "step": row["step"], "member": member, "from": int(origin), "old": previous[member],
                    "new": current[member],
                }  # fmt: skip


def table(row: Mapping[str, Any], sweep: Sweep) -> list[str]:
    """Formats the members as lines of a table, and a last line that names the best.

    Args:
      row: The last row of metrics.
      sweep: The sweep of the job.
    """
    scores = [score for score in SCORES if f"{score}/0" in row]
    ranking = sorted(range(sweep.count), key=lambda member: _sort_key(row[f"{scores[0]}/{member}"]))
    headers = [score.replace("_", " ") for score in scores]
    cells = [["member", *(ROOM + name for name in sweep.values), *headers]]
    cells += [
        [str(member), *(f"{row[f'{name}/{member}']:.4g}" for name in sweep.values),
         *(_format_loss(row[f"{score}/{member}"]) for score in scores)]
        for member in range(sweep.count)
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    best = ranking[0]
    settings = ", ".join(f"{ROOM}{name} = {row[f'{name}/{best}']:.4g}" for name in sweep.values)
    return [*lines, f"best member: {best}, {headers[0]} {_format_loss(row[f'{scores[0]}/{best}'])}, {settings}"]


def _sort_key(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss


def _format_loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
