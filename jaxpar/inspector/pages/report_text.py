"""The report as a page of text."""

from jaxpar.columns import fold, table, terminal_width
from jaxpar.inspector.facts import ReportFacts
from jaxpar.inspector.pages.pipeline import sentences
from jaxpar.mesh.collective import Collective
from jaxpar.units import show_bytes, show_count, show_seconds

_ROWS = 24
_BAR = 28


def page(report: ReportFacts, *, width: int | None = None) -> str:
    """Renders the whole report.

    Args:
      report: The report.
      width: Line width in columns; 0 is unlimited, None is the width of the terminal.
    """
    width = terminal_width() if width is None else width
    parts = [_head(report), _memory(report, width), _pipeline(report), _ledger(report, width), _work(report)]
    parts.append(_flags(report))
    return fold("\n\n".join(part for part in parts if part) + "\n", width)


def _head(report: ReportFacts) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in report.sizes.items() if size > 1) or "one device"
    nodes = -(-report.count // report.per_node)
    where = f"{report.devices}, {axes}" + (f", {nodes} nodes of {report.per_node}" if report.chip and nodes > 1 else "")
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return f"{report.title}\n{where}; compiled in {show_seconds(report.seconds)} by {versions}"


def _memory(report: ReportFacts, width: int) -> str:
    room = "no capacity on simulated devices"
    if report.capacity is not None and report.chip is not None:
        room = f"{'fits' if report.fits else 'DOES NOT FIT'}: {report.room}"
    scale, bar = max([share.bytes for share in report.memory], default=1), min(_BAR, width // 8) if width else _BAR
    rows = [
        (
            share.cause,
            show_bytes(share.bytes),
            f"{share.bytes / report.total:.1%}",
            share.how,
            "█" * max(1, round(bar * share.bytes / scale)) if share.bytes > 0 else "",
            share.largest[0][0] if share.largest and share.how == "compiled" else "",
        )
        for share in report.memory
    ]
    lines = [
        f"Memory per device: {show_bytes(report.total)}; {room}",
        *([table(rows, right=(1, 2), width=width)] if rows else []),
    ]
    if report.knobs:
        lines.append("Changes that would free most memory, each compiled:")
        lines += [f"  {change}  frees {show_bytes(freed)}" for change, freed in report.knobs]
    return "\n".join(lines)


def _pipeline(report: ReportFacts) -> str:
    if report.schedule is None:
        return ""
    first, *more_sentences = (f"{words} ({how})" for words, how in sentences(report.schedule, report.ledger))
    return "\n  ".join([f"Pipeline: {first}", *more_sentences])


def _ledger(report: ReportFacts, width: int) -> str:
    if not report.ledger:
        return "Collectives: none"
    header = ("collective", "axes", "dtype", "group", "times", "payload", "wire/step", "", "because", "at")
    rows = [header, *(_row(entry) for entry in report.ledger[:_ROWS])]
    lines = ["Collectives of a step, per device (compiled)", table(rows, right=(3, 4, 5, 6), width=width)]
    if len(report.ledger) > _ROWS:
        wire = sum(entry.step_wire for entry in report.ledger[_ROWS:])
        lines.append(
            f"  and {len(report.ledger) - _ROWS} smaller ones, {show_bytes(wire)} on the wire; all of them in --json"
        )
    for axis, kinds in sorted(report.by_axis.items(), key=lambda pair: -sum(pair[1].values())):
        parts = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in sorted(kinds.items(), key=lambda p: -p[1]))
        lines.append(f"  {axis}: {show_bytes(sum(kinds.values()))} on the wire: {parts}")
    return "\n".join(lines)


def _row(entry: Collective) -> tuple[str, ...]:
    return (
        entry.kind, entry.axis, entry.dtype, str(entry.group), "?" if entry.times is None else str(entry.times),
        show_bytes(entry.payload), show_bytes(entry.step_wire), "async" if entry.asynchronous else "sync",
        entry.cause + (" gradient" if entry.has_parameters and entry.backward else ""), entry.source,
    )  # fmt: skip


def _work(report: ReportFacts) -> str:
    flop = report.flop
    lines = [f"FLOP per device and step: {show_count(flop.total)} (compiled)"]
    if flop.recomputed:
        lines[0] += f", {flop.recomputed / flop.total:.1%} of them recomputation"
    if report.model_flop:
        share = report.model_flop / report.count
        lines.append(f"  the model's own: {show_count(share)} (exact), {share / flop.total:.1%} of what is computed")
    time = report.timeline
    if time:
        exposed = sum(time.exposed.values())
        lines.append(
            f"Time of a step: {show_seconds(time.seconds)} (modelled), {show_seconds(time.compute)} of kernels and "
            f"{show_seconds(exposed)} waiting for collectives"
        )
        for stream, busy in sorted(time.communication.items(), key=lambda pair: -pair[1]):
            waited = time.exposed.get(stream, 0.0)
            lines.append(f"  {stream}: {show_seconds(busy)} of collectives, {show_seconds(waited)} of them exposed")
        if report.mfu is not None:
            lines.append(f"  MFU {report.mfu:.1%} (modelled)")
    return "\n".join(lines)


def _flags(report: ReportFacts) -> str:
    lines = [f"Flags: {len(report.flags)}" if report.flags else "Flags: none"]
    lines += [f"  {flag}" for flag in report.flags]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)
