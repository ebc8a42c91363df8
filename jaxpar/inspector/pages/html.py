"""The report as one HTML file, or as part of a notebook; `tag` escapes all of its text, which comes from users."""

from collections.abc import Callable, Sequence
from math import isfinite

from jaxpar.hlo.attribution import Argument
from jaxpar.html.charts import section as pieces
from jaxpar.html.markup import (
    HOW,
    Markup,
    badge,
    bar,
    document,
    heading,
    in_ascii,
    join,
    memory_bar,
    style,
    swatch,
    table,
    tag,
    tile,
)
from jaxpar.inspector.facts import ReportFacts
from jaxpar.inspector.findings import Flag
from jaxpar.inspector.memory_causes import CAUSES, Share
from jaxpar.inspector.pages.mesh_and_timeline import (
    TURNS,
    kind_class,
    labelled_axes,
    mesh,
    periods_without_events,
    shaded_axes,
    timeline,
)
from jaxpar.inspector.pages.pipeline import section
from jaxpar.inspector.timeline import Timeline
from jaxpar.mesh.axes import nodes_of_axes
from jaxpar.mesh.collective import KINDS, Collective
from jaxpar.units import show_bytes, show_count, show_seconds

# The part of a page about communication: bytes by axis, and every collective.

_ROWS = 24  # rows of the ledger, before the smaller ones are folded


def collectives(report: ReportFacts) -> Markup:
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


def _by_axis(report: ReportFacts) -> Markup:
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


def fragment(report: ReportFacts) -> str:
    """Renders the report as HTML for a notebook, with folded sections; its styles apply only to this HTML."""
    folded = [
        tag("details", tag("summary", title), body, cls="jx-section", open="" if title == "Memory" else None)
        for title, body in _sections(report)
    ]
    top = [tag("div", report.title, cls="jx-title"), *_overview(report)]
    return in_ascii(tag("div", tag("style", Markup(style())), *top, *folded, _legend(report), cls="jaxpar jx-fragment"))


def page(report: ReportFacts) -> str:
    """The report as a page."""
    sections = [tag("section", tag("h2", title), body) for title, body in _sections(report)]
    return document(report.title, *_overview(report), *sections, _legend(report))


def _overview(report: ReportFacts) -> list[Markup]:
    return [_subtitle(report), _verdict(report), _numbers(report), *_flags(report.flags)]


def _sections(report: ReportFacts) -> list[tuple[str, Markup]]:
    """(title, body) of everything below the flags."""
    builders: list[tuple[str, Callable[[ReportFacts], Markup]]] = [
        ("Memory", _memory),
        ("Mesh", _mesh),
        ("Who holds what", lambda report: pieces(report.cards) if report.cards else Markup()),
        ("Pipeline", lambda report: section(report.schedule, report.ledger) if report.schedule else Markup()),
        ("Collectives", collectives),
        ("Timeline", _timeline),
        ("Arrays", _arguments),
        ("Notes", _notes),
    ]
    return [(title, body) for title, make in builders if (body := make(report))]


def _subtitle(report: ReportFacts) -> Markup:
    axes = " × ".join(f"{axis} {size}" for axis, size in report.sizes.items() if size > 1) or "one device"
    nodes = -(-report.count // report.per_node)
    words = [report.devices, axes]
    if report.chip and nodes > 1:
        words.append(f"{nodes} nodes of {report.per_node}")
    words.append(f"compiled in {show_seconds(report.seconds)}")
    words += [f"{name} {version}" for name, version in report.versions.items()]
    return tag("p", " · ".join(words), cls="jx-where")


def _verdict(report: ReportFacts) -> Markup:
    need = show_bytes(report.total)
    if report.capacity is None or report.chip is None:
        reason = "simulated devices have" if report.devices.endswith(" cpu") else "a chip outside of jaxpar's table has"
        look, words, detail = "none", "No capacity", f"{need} per device; {reason} neither a capacity nor a time"
    else:
        look, words = ("fits", "Fits") if report.fits else ("over", "Does not fit")
        detail = f"{need} per device; {report.room}"
        if not report.fits:
            detail += f", {show_bytes(report.total - report.capacity)} less than it needs"
    count = len(report.flags)
    flags = tag("span", f"{count} flag{'s' * (count != 1)}" if count else "no flags",
                cls="jx-count jx-warn" if count else "jx-count")  # fmt: skip
    return tag("div", tag("strong", words), tag("span", detail), flags, cls=f"jx-verdict jx-{look}")


def _numbers(report: ReportFacts) -> Markup:
    flop, wire = report.flop, sum(entry.step_wire for entry in report.ledger)
    at_least = "≥ " if any(entry.times is None for entry in report.ledger) else ""
    room = (
        f"{report.total / report.capacity:.1%} of what a program may take"
        if report.capacity
        else "arguments, outputs and temporary memory"
    )
    work = [f"{flop.recomputed / flop.total:.1%} recomputation"] if flop.total and flop.recomputed else []
    if report.model_flop:
        model_share = report.model_flop / report.count
        part = f", {model_share / flop.total:.1%} of what is computed" if flop.total else ""
        work.append(f"the model's own: {show_count(model_share)}{part} (exact)")
    count = len(report.ledger)
    tiles = [
        ("Memory per device", show_bytes(report.total), room, "compiled"),
        ("On the wire", at_least + show_bytes(wire),
         f"sent by each device in a step; {count} collective{'s' * (count != 1)} in the ledger", "compiled"),
        ("FLOP per step", ("≥ " if flop.unknown else "") + show_count(flop.total),
         "; ".join(["per device", *work]), "compiled"),
    ]  # fmt: skip
    time = _time(report)
    if time:
        step = ("≥ " if time.unknown else "") + show_seconds(time.seconds)
        waiting = f"{show_seconds(sum(time.exposed.values()))} of it waiting for collectives"
        tiles.append(("Time of a step", step, waiting, "modelled"))
        if report.mfu is not None:
            share = f"{report.mfu:.1%}" if report.mfu >= 0.001 else "< 0.1%"
            tiles.append(("MFU", share, "of the chips' bfloat16 peak", "modelled"))
    return tag("div", *[tile(*fields) for fields in tiles], cls="jx-tiles")


def _time(report: ReportFacts) -> Timeline | None:
    """The modelled step if it has a length."""
    time = report.timeline if report.chip else None
    return time if time and isfinite(time.seconds) and time.seconds > 0 else None


def _flags(flags: Sequence[Flag]) -> list[Markup]:
    if not flags:
        return []
    cards = [
        tag(
            "li",
            tag("strong", flag.kind),
            *([tag("span", f"{show_bytes(flag.bytes)} on the wire", cls="jx-cost")] if flag.bytes else []),
            tag("p", flag.text),
            tag("p", tag("b", "Fix: "), flag.fix, cls="jx-fix"),
        )
        for flag in flags
    ]
    return [tag("ul", *cards, cls="jx-flags", aria_label="Flags")]


def _memory(report: ReportFacts) -> Markup:
    parts, rows = [], []
    for share in report.memory:
        colour = f"jx-c{CAUSES.index(share.cause)}" if share.cause in CAUSES else "jx-other"
        part = f"{share.bytes / max(report.total, 1):.1%}"
        parts.append((colour, f"{share.cause}: {show_bytes(share.bytes)}, {part}", share.bytes))
        rows.append((swatch(colour, share.cause), show_bytes(share.bytes), part, badge(share.how), _largest(share)))
    rows.append((tag("b", "total"), tag("b", show_bytes(report.total)), "", "", ""))
    head = ("cause", "bytes", "share", "how", "largest arrays")
    return join(
        [
            memory_bar(parts, report.total, report.capacity),
            table("Memory by cause", head, rows, "tnntw"),
            _knobs(report),
        ]
    )


def _knobs(report: ReportFacts) -> Markup:
    if not report.knobs:
        return Markup()
    short = max(report.total - report.capacity, 0) if report.capacity else 0
    rows = [(change, show_bytes(freed), "enough alone" if 0 < short <= freed else "") for change, freed in report.knobs]
    need = f" {show_bytes(short)} must be freed." if short else ""
    return join([heading(f"What would free memory.{need} ", badge("compiled")),
                 table("What would free memory", ("change", "frees", ""), rows, "wnt")])  # fmt: skip


def _largest(share: Share) -> Markup:
    lines = [join([name, " ", tag("span", show_bytes(size), cls="jx-small")]) for name, size in share.largest]
    if len(lines) < 2:
        return join(lines)
    overflow_note = tag("span", f", and {len(lines) - 1} more", cls="jx-small")
    return tag("details", tag("summary", lines[0], overflow_note), tag("ul", *[tag("li", line) for line in lines[1:]]))


def _mesh(report: ReportFacts) -> Markup:
    named = report.chip is not None or report.count > report.per_node
    nodes = nodes_of_axes(report.sizes, report.per_node)
    looks = dict(zip(shaded_axes(report.sizes), ("shade of a cell", "bar below it"), strict=False))
    axes = []
    for axis in (axis for axis, size in report.sizes.items() if size > 1):
        words = [f"over {nodes[axis]} nodes" if nodes[axis] > 1 else "within a node"] if named else []
        words += [looks[axis]] if axis in looks else []
        axes.append(tag("li", tag("b", f"{axis} {report.sizes[axis]}"), f" {', '.join(words)}"))
    labels = "·".join(labelled_axes(report.sizes))
    key = [tag("li", "numbers: ", tag("b", labels))] if labels else []
    return join([tag("ul", *axes, *key, cls="jx-key"), mesh(report.sizes, report.per_node, named=named)])


def _timeline(report: ReportFacts) -> Markup:
    time = _time(report)
    if not time:
        return Markup()
    kinds = {entry.kind for entry in report.ledger}
    names = [("jx-dot", "matmuls"), ("jx-op", "other kernels"),
             *[(kind_class(kind), kind) for kind in KINDS if kind in kinds]]  # fmt: skip
    if any(TURNS.fullmatch(event.name) for event in time.events):
        names.append(("jx-turns", "+n×: n more turns of a loop, as one block"))
    if periods_without_events(time):
        names.append(("jx-hidden", "not drawn, and squeezed"))
    legend = tag("ul", *[tag("li", swatch(colour, name)) for colour, name in names], cls="jx-key")
    waiting = show_seconds(sum(time.exposed.values()))
    words = f"A step of {show_seconds(time.seconds)}: {show_seconds(time.compute)} of kernels and {waiting} waiting. "
    words += "A loop of unknown trip count counts once. " if time.unknown else ""
    return join([tag("p", words, badge("modelled")), legend, timeline(time)])


def _arguments(report: ReportFacts) -> Markup:
    if not report.arguments:
        return Markup()
    head = ("path", "placed as", "shape", "on one device", "bytes", "role")
    rows = table("Arrays", head, [_argument(argument) for argument in report.arguments], "wwttnt")
    size = show_bytes(sum(argument.bytes for argument in report.arguments if not argument.host))
    count = len(report.arguments)
    words = join([f"{count} array{'s' * (count != 1)}, {size} on each device ", badge("exact")])
    if count <= 12:
        return join([tag("p", words), rows])
    return tag("details", tag("summary", words), rows)


def _argument(argument: Argument) -> tuple[str, ...]:
    shapes = ("×".join(map(str, shape)) or "scalar" for shape in (argument.shape, argument.shard))
    role = argument.role + (", in host memory" if argument.host else "")
    return (argument.path, argument.placed, *shapes, show_bytes(argument.bytes), role)


def _notes(report: ReportFacts) -> Markup:
    return tag("ul", *[tag("li", note) for note in report.notes]) if report.notes else Markup()


def _legend(report: ReportFacts) -> Markup:
    provenances = [how for how in HOW if how != "modelled" or _time(report)]
    return tag("ul", *[tag("li", badge(how), f" {HOW[how]}") for how in provenances], cls="jx-key jx-legend")
