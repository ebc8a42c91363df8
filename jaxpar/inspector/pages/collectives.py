"""The part of a page about communication: bytes by axis, and every collective."""

from collections.abc import Sequence

from jaxpar.html.bars import bar
from jaxpar.html.markup import Markup, badge, heading, join, swatch, table, tag
from jaxpar.inspector.facts import Facts
from jaxpar.inspector.pages.mesh_svg import kind_class
from jaxpar.mesh.collective import Collective
from jaxpar.units import show_bytes

_ROWS = 24  # rows of the ledger, before the smaller ones are folded


def collectives(report: Facts) -> Markup:
    """Bytes on the wire by axis, and the ledger."""
    if not report.ledger:
        return tag(
            "p", f"No collectives: {'the devices never talk to each other' if report.count > 1 else 'one device'}."
        )
    largest = max(entry.step_wire for entry in report.ledger)
    rows = [_row(entry, largest) for entry in report.ledger]
    body = [_by_axis(report), heading("Ledger of a step, per device ", badge("compiled")), _ledger(rows[:_ROWS])]
    if len(rows) > _ROWS:
        wire = show_bytes(sum(entry.step_wire for entry in report.ledger[_ROWS:]))
        summary = tag("summary", f"and {len(rows) - _ROWS} smaller ones, {wire} on the wire")
        body.append(tag("details", summary, _ledger(rows[_ROWS:])))
    words = "Wire is what each device sends, by ring algorithms: (n−1)/n of the payload, all-reduce twice that."
    if any(axis.startswith("~") for entry in report.ledger for axis in entry.axes):
        words += " ~ marks a part of an axis."
    return join([*body, tag("p", words, cls="jx-small")])


def _by_axis(report: Facts) -> Markup:
    totals = {axis: sum(kinds.values()) for axis, kinds in report.by_axis.items()}
    largest, rows = max([*totals.values(), 1]), []
    for axis in sorted(totals, key=lambda axis: -totals[axis]):
        kinds = sorted(report.by_axis[axis].items(), key=lambda pair: -pair[1])
        parts = [(kind_class(kind), "", size) for kind, size in kinds]
        words = [
            tag("span", swatch(kind_class(kind), f"{kind} {show_bytes(size)}"), cls="jx-item") for kind, size in kinds
        ]
        rows.append((axis, show_bytes(totals[axis]), bar(parts, largest), join(words)))
    return table("Wire bytes by axis", ("axes", "wire/step", "", "by kind"), rows, "tntw")


def _ledger(rows: Sequence[Sequence[str]]) -> Markup:
    head = ("collective", "axes", "dtype", "group", "times", "payload", "wire/step", "", "", "because", "at")
    return table("Collectives", head, rows, "tttnnnnttws")


def _row(entry: Collective, most: float) -> tuple[str, ...]:
    colour = kind_class(entry.kind)
    times = "?" if entry.times is None else str(entry.times)
    trips = "×".join("?" if trip is None else str(trip) for trip in entry.loop) if len(entry.loop) > 1 else ""
    remarks = [f"loops {trips}"] if trips else []
    remarks += [f"{entry.count} arrays in one"] if entry.count > 1 else []
    remarks += [f"{entry.senders:.0%} of the devices send"] if entry.senders < 1 else []
    remarks += ["backward"] if entry.backward else []
    cause = entry.cause + (" gradient" if entry.has_parameters and entry.backward else "")
    return (
        swatch(colour, entry.kind), entry.axis, entry.dtype, str(entry.group), times, show_bytes(entry.payload),
        show_bytes(entry.step_wire), bar([(colour, "", entry.step_wire)], most, cls="jx-bar jx-short"),
        "async" if entry.asynchronous else "sync",
        join([cause, *([" ", tag("span", ", ".join(remarks), cls="jx-small")] if remarks else [])]), entry.source,
    )  # fmt: skip
