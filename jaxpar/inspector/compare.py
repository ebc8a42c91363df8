"""Two reports side by side."""

from jaxpar.inspector.report import Report
from jaxpar.units import show_bytes, show_count, show_seconds


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
