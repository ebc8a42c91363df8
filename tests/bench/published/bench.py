"""`python -m tests.bench.planner --runs FILE`: predictions beside any table of published runs."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jaxpar.measure.record import commit, versions
from jaxpar.plan.measurements.prediction_errors import HeldOutRun, load_published

from ..published.first import first
from ..published.held_out import HeldOut, held_out, residual
from ..published.judged import BY, Judged, grouped, judge_all, score
from ..published.page import write
from ..published.read import load
from ..published.show import after, by_group, constants, interval, lines, package_interval

SHIPPED = "Predictions are modelled, by the package's constants; seconds were measured and published by others."


def runs(path: str | None, *, by: str = "group", html: str = "", to: str = "") -> dict[str, Any]:
    """Prints every run of a table beside its prediction by the package's constants, and how good they are by group.

    Args:
      path: The table; None is that of the package.
      by: What groups are made of, one of `judged.BY`.
      html: Where to write a page of the errors; "" writes none.
      to: Where to write the errors of systems without a run in the package, as a plan reads them; "" writes none.

    Raises:
      JaxparError: With all lines of the table that lack something or contradict themselves.
    """
    judged = judge_all(load(path))
    _print(judged, by)
    if path is not None:  # the package's own runs gave the interval
        print(package_interval(judged))
    _page(judged, html, by, SHIPPED)
    if to:
        fitted = {run.system.split()[-1] for run in load_published()}  # "JAX-Toolbox Pax" is "Pax"
        _write([run for run in judged if residual(run).system.split()[0] not in fitted], to)
    return _told(judged)


def left_out(path: str | None, *, by: str = "group", html: str = "", to: str = "") -> dict[str, Any]:
    """Prints the same by constants that never saw a run's group; the runs of `first.py` are among those that fit them.

    Args:
      path: As in `runs`.
      by: What is left out together, one of `judged.BY`.
      html: As in `runs`.
      to: Where to write the errors, as `jaxpar.plan.measurements.prediction_errors` reads them; "" writes none.

    Raises:
      JaxparError: As in `runs`.
    """
    table = load(path)
    judge_all(table)  # whatever its lines contradict is told before a fit of a minute begins
    found = held_out([*table, *first()], by=by)
    mine, every = found.judged[: len(table)], found.judged
    print(f"{constants(found)}\n\nFitted on all {len(every)} runs, those of the table and {len(first())} more:\n")
    print(f"{by_group(found.fitted, by)}\n\nEach group by constants that never saw it, those of the table:\n")
    _print(mine, by)
    print(f"All {len(every)}:\n\n{by_group(every, by)}\n\n{after(every, by)}\n\n{interval(mine)}")
    _page(
        mine, html, by, f"Predictions by constants that were fitted on the other groups; each {by} is left out in turn."
    )
    if to:
        _write(every, to)
    return _told(mine) | {"constants": found.values, "without": found.without, "fitted": _scores(found, by)}


def _scores(found: HeldOut, by: str) -> dict[str, Any]:
    return {name: asdict(score(some)) for name, some in grouped(found.fitted, by).items()}


def _print(judged: Sequence[Judged], by: str) -> None:
    print(f"{lines(judged)}\n")
    for each in dict.fromkeys((by, *BY)):
        print(f"{by_group(judged, each)}\n")


def _page(judged: Sequence[Judged], html: str, by: str, note: str) -> None:
    if html:
        Path(html).write_text(write(judged, title="Published runs and their predictions", by=by, note=note))
        print(f"page: {html}")


def _told(judged: Sequence[Judged]) -> dict[str, Any]:
    return {
        "runs": [each.to_dict() for each in judged],
        "all": asdict(score(judged)),
        "by": {key: {name: asdict(score(some)) for name, some in grouped(judged, key).items()} for key in BY},
        "where": {"versions": versions(), "commit": commit()},
    }


def _write(judged: Sequence[Judged], to: str) -> None:
    with Path(to).open("w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, [each.name for each in fields(HeldOutRun)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(residual(each)) for each in judged)
    print(f"errors: {to}")
