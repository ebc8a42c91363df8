"""The end of a sweep: its members, the best first, and who copied whom.

RUN/metrics.jsonl    loss/0, learning_rate/0, ... of each member, in every step; with pbt from/0, ... where they copied
                     with evolution and swarm score/0, ... where a round's scores were read
RUN/lineage.jsonl    with pbt a line for each copy: step, member, from, its settings before and after
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar.exchange.population.sweep import ROOM, Sweep
from jaxpar.files import write_text

LINEAGE = "lineage.jsonl"
SCORES = ("eval_loss", "loss")  # by the first that there is, members are ranked


def ended(folder: Path, sweep: Sweep) -> list[str]:
    """Writes the lineage of a population that copies, and returns its members as lines, with the best in the last.

    Args:
      folder: The run folder.
      sweep: The job's.
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
    """Returns a line with the best settings of any round that is over, where members train in rounds."""
    found = [
        (score, number, member)
        for number, row in enumerate(rows)
        for member in range(sweep.count)
        if (score := row.get(f"score/{member}")) is not None
    ]
    if not found:
        return []
    score, number, member = min(found, key=lambda each: _worth(each[0]))
    settings = ", ".join(f"{ROOM}{name} = {rows[number - 1][f'{name}/{member}']:.4g}" for name in sweep.values)
    first = rows[number]["step"] - sweep.every
    return [f"best of the rounds before: loss {_shown(score)} in the round from step {first}, {settings}"]


def lineage(rows: Iterable[Mapping[str, Any]], values: Mapping[str, tuple[float, ...]]) -> Iterator[dict[str, Any]]:
    """Yields a line for each copy that a member became.

    Args:
      rows: Of the metrics, from the first step on.
      values: Setting to its value for each member, as they began.
    """
    members = range(len(next(iter(values.values()))))
    now = [{name: each[member] for name, each in values.items()} for member in members]
    for row in rows:
        before, now = now, [{name: row[f"{name}/{member}"] for name in values} for member in members]
        for member in members:
            origin = row.get(f"from/{member}", member)
            if origin != member:
                yield {
                    "step": row["step"], "member": member, "from": int(origin), "old": before[member],
                    "new": now[member],
                }  # fmt: skip


def table(row: Mapping[str, Any], sweep: Sweep) -> list[str]:
    """Returns the members of a row of metrics as lines of a table, and a last line that names the best.

    Args:
      row: Of metrics.
      sweep: The job's.
    """
    scores = [score for score in SCORES if f"{score}/0" in row]
    ranked = sorted(range(sweep.count), key=lambda member: _worth(row[f"{scores[0]}/{member}"]))
    said = [score.replace("_", " ") for score in scores]
    cells = [["member", *(ROOM + name for name in sweep.values), *said]]
    cells += [
        [str(member), *(f"{row[f'{name}/{member}']:.4g}" for name in sweep.values),
         *(_shown(row[f"{score}/{member}"]) for score in scores)]
        for member in range(sweep.count)
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    best = ranked[0]
    settings = ", ".join(f"{ROOM}{name} = {row[f'{name}/{best}']:.4g}" for name in sweep.values)
    return [*lines, f"best member: {best}, {said[0]} {_shown(row[f'{scores[0]}/{best}'])}, {settings}"]


def _worth(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
