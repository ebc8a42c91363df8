"""Budgets: assertions about a report, for a user's own tests.

def test_the_step_keeps_its_collectives():
report = jp.inspect(step, batch)
jp.assert_collectives(report, {"tensor": {"all-reduce": 4 * LAYERS + 1, "all-gather": 1}}, at_least=activation_bytes)
jp.assert_fits(report)
"""

from collections.abc import Mapping

from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.inspector.report import Report
from jaxpar.mesh.collective import KINDS, Collective
from jaxpar.units import parse_bytes, show_bytes, show_count, show_seconds


def assert_collectives(
    report: Report, budget: Mapping[str, Mapping[str, int | str]], *, at_least: int | str = 0
) -> None:
    """Checks the collectives of a step against a budget.

    Args:
      report: The report.
      budget: Axes (`data`, or `data,fsdp` if one collective runs over both) to kind to either the exact number of
        arrays that a step sends this way, or a size such as "1.5 GiB" that their payload must not exceed.
        A kind that is missing for a listed axis must not run over it.
      at_least: Arrays with a smaller payload are ignored.

    Raises:
      JaxparError: Lists every entry that differs, and its cause.
    """
    _check_given(report)
    if not isinstance(budget, Mapping) or not all(isinstance(kinds, Mapping) for kinds in budget.values()):
        raise refuse(
            f"budget={budget!r:.60}",
            rule="a budget maps each axis to {kind of collective: count or bytes}",
            fix='{"tensor": {"all-reduce": 18}}',
        )
    smallest = parse_bytes(at_least)
    axes = {*report.sizes, *(entry.axis for entry in report.ledger)}
    problems: list[Problem] = []
    for axis, kinds in budget.items():
        if axis not in axes and not all(part in report.sizes for part in axis.split(",")):
            raise refuse(f"axis {axis!r} in a budget", rule=f"an axis of the mesh: {', '.join(report.sizes)}",
                         fix=suggest(axis, axes))  # fmt: skip
        for kind in kinds:
            if kind not in KINDS:
                raise refuse(f"{kind!r} in a budget", rule=f"one of {', '.join(KINDS)}", fix=suggest(kind, KINDS))
        parts = set(axis.split(","))
        on_axis = [entry for entry in report.ledger if set(entry.axes) == parts and entry.payload >= smallest]
        for kind in KINDS:
            problems += _differs(axis, kind, kinds.get(kind, 0), [entry for entry in on_axis if entry.kind == kind])
    if problems:
        raise JaxparError(*problems)


def _differs(axis: str, kind: str, allowed: int | str, entries: list[Collective]) -> list[Problem]:
    shown = "; ".join(
        f"{entry.times if entry.times is not None else '?'} x {entry.dtype} {show_bytes(entry.payload)}, {entry.cause}"
        f"{f' ({entry.source})' if entry.source else ''}"
        for entry in entries[:6]
    )
    if any(entry.times is None for entry in entries):
        return [Problem(f"{kind} over {axis} an unknown number of times: {shown}",
                        "collectives can be counted if every loop has a known trip count",
                        "a loop with a fixed length")]  # fmt: skip
    if isinstance(allowed, str):
        total, limit = sum(entry.step_payload for entry in entries), parse_bytes(allowed)
        if total <= limit:
            return []
        return [Problem(f"{kind} over {axis}: {show_bytes(total)} in a step: {shown}", f"at most {show_bytes(limit)}",
                        "another sharding of the largest arrays, or another budget")]  # fmt: skip
    times = sum(entry.times or 0 for entry in entries)
    if times == allowed:
        return []
    return [Problem(f"{kind} over {axis}: {times} in a step{': ' * bool(shown)}{shown}", f"the budget says {allowed}",
                    "another sharding of these arrays, or another budget")]  # fmt: skip


def assert_fits(report: Report) -> None:
    """Checks that a program fits into its devices.

    Raises:
      JaxparError: If it does not, with its largest causes; or if the devices have no known capacity.
    """
    _check_given(report)
    if report.capacity is None:
        raise refuse(
            f"whether {report.title} fits on {report.devices}",
            rule="simulated devices have no capacity of their own",
            fix="inspect it for a GPU: jp.target_devices('h100:1x8')",
        )
    if not report.fits:
        causes = ", ".join(
            f"{share.cause} {show_bytes(share.bytes)}" for share in sorted(report.memory, key=lambda s: -s.bytes)[:4]
        )
        raise refuse(
            f"{report.title} needs {show_bytes(report.total)} per device: {causes}",
            rule=report.room,
            fix="; ".join(f"{change} frees {show_bytes(freed)}" for change, freed in report.knobs[:3])
            or "remat, more microbatches, a higher zero, or more devices",
        )


def _check_given(report: Report) -> None:
    if not isinstance(report, Report):
        raise refuse(
            f"a report that is {report!r:.60}", rule="a report is what jp.inspect returns", fix="jp.inspect(...)"
        )


# Two reports side by side.


def compare(one: Report, other: Report) -> str:
    """A table of memory, traffic, FLOP and time of two reports, and their differences."""
    rows: list[tuple[str, float, float, str]] = []
    causes = {share.cause: [share.bytes, 0] for share in one.memory}
    for share in other.memory:
        causes.setdefault(share.cause, [0, 0])[1] = share.bytes
    rows += [(f"memory: {cause}", pair[0], pair[1], "bytes") for cause, pair in causes.items()]
    rows.append(("memory", one.total, other.total, "bytes"))
    for axis in sorted({*one.by_axis, *other.by_axis}):
        kinds = sorted({*one.by_axis.get(axis, {}), *other.by_axis.get(axis, {})})
        rows += [
            (
                f"{axis}: {kind}",
                one.by_axis.get(axis, {}).get(kind, 0.0),
                other.by_axis.get(axis, {}).get(kind, 0.0),
                "bytes",
            )
            for kind in kinds
        ]
    rows.append(("FLOP per device", one.flop.total, other.flop.total, "count"))
    if one.timeline and other.timeline:
        exposed = [sum(report.timeline.exposed.values()) if report.timeline else 0.0 for report in (one, other)]
        rows.append(("waiting for collectives (modelled)", exposed[0], exposed[1], "seconds"))
        rows.append(("time of a step (modelled)", one.timeline.seconds, other.timeline.seconds, "seconds"))
    show = {"bytes": show_bytes, "count": show_count, "seconds": show_seconds}
    width = max(len(name) for name, *_ in rows)
    lines = [
        f"one:   {one.title}",
        f"other: {other.title}",
        f"  {'':<{width}}  {'one':>12}  {'other':>12}  {'other - one':>13}",
    ]
    for name, first, second, unit in rows:
        delta = second - first
        sign = "+" if delta > 0 else "-" if delta < 0 else ""
        difference = f"{sign}{show[unit](abs(delta))}" if delta else "the same"
        lines.append(f"  {name:<{width}}  {show[unit](first):>12}  {show[unit](second):>12}  {difference:>13}")
    return "\n".join(lines)
