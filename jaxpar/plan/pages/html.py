"""A plan as one HTML file: what to take, where its step goes, what less memory costs, what the answer hangs on."""

from collections.abc import Sequence

from jaxpar.html.bars import bar
from jaxpar.html.frame import document, in_ascii, style, tile
from jaxpar.html.markup import HOW, Markup, badge, join, percent, swatch, table, tag
from jaxpar.plan.measured.trust import expected_error
from jaxpar.plan.pages.looks import css, of_bytes, of_seconds
from jaxpar.plan.pages.pareto_svg import scatter
from jaxpar.plan.pages.text import batch_of, hopeless, leaner, on_host, spare, why
from jaxpar.plan.search import Plan, Ranked, describe
from jaxpar.plan.speed import cost, speed
from jaxpar.plan.validation import Checked
from jaxpar.units import show_bytes, show_count, show_seconds

_ROOMY = 0.16  # of the width: a part that has place for its seconds


def write(plan: Plan, *, title: str, command: str = "", checked: Sequence[Checked] = ()) -> str:
    """Returns the page.

    Args:
      plan: The answer.
      title: Of the page; any text.
      command: What trains the first layout.
      checked: What a compiler said to some.
    """
    top, sections, legend = _parts(plan, command=command, checked=checked)
    told = [tag("section", tag("h2", name), body) for name, body in sections]
    return document(title, tag("style", css()), *top, *told, legend)


def fragment(plan: Plan, *, title: str, command: str = "") -> str:
    """Returns the plan as HTML for a notebook: sections are folded, but for the first."""
    top, sections, legend = _parts(plan, command=command)
    folded = [
        tag("details", tag("summary", name), body, cls="jx-section", open=None if number else "")
        for number, (name, body) in enumerate(sections)
    ]
    head = [tag("style", Markup(style()), css()), tag("div", title, cls="jx-title")]
    return in_ascii(tag("div", *head, *top, *folded, legend, cls="jaxpar jx-fragment"))


def _parts(
    plan: Plan, *, command: str, checked: Sequence[Checked] = ()
) -> tuple[list[Markup], list[tuple[str, Markup]], Markup]:
    """Returns what is on top, (name, body) of each section, and the legend."""
    sections = [
        ("Where a step goes", _breakdown(plan)),
        ("In host memory", _on_host(plan)),
        ("Memory against time", join([scatter(plan), _leaner(plan)])),
        ("If an assumption is wrong", _doubts(plan)),
        ("Compiled", _checked(checked)),
        ("Train it so", tag("div", tag("code", command), cls="jx-scroll jx-command") if command else Markup()),
    ]
    top = [_where(plan), _verdict(plan), _numbers(plan), _left_out(plan)]
    known = [how for how in HOW if how != "compiled" or checked]
    legend = tag("ul", *[tag("li", badge(how), f" {HOW[how]}") for how in known], cls="jx-key jx-legend")
    return top, [(name, body) for name, body in sections if body], legend


def _where(plan: Plan) -> Markup:
    asked = plan.question
    hardware = asked.hardware
    nodes = -(-asked.devices // hardware.per_node)
    words = [
        f"{show_count(asked.model.parameters).replace('G', 'B')} parameters",
        f"{asked.devices} × {hardware.chip.name}",
        f"{nodes} node{'s' * (nodes > 1)} of {min(hardware.per_node, asked.devices)}",
        batch_of(asked),
        f"expected error of a step: {expected_error(asked, plan.best[0])}",
        *[f"attention: {words}" for words in [asked.model.attention(asked.software)] if words],
    ]
    return tag("p", " · ".join(words), cls="jx-where")


def _verdict(plan: Plan) -> Markup:
    first = plan.best[0]
    name = tag("strong", describe(first.candidate))
    said, ways = hopeless(plan)
    if not said:
        return tag("div", name, tag("span", why(first, plan)), cls="jx-verdict jx-fits")
    head = tag("div", name, tag("span", said), cls="jx-verdict jx-over")
    help_ = [tag("p", "What would help: ", badge("modelled")), tag("ul", *[tag("li", way) for way in ways])]
    return join([head, *help_ * bool(ways)])


def _numbers(plan: Plan) -> Markup:
    first, asked = plan.best[0], plan.question
    fast = speed(asked, first)
    gemm, room = asked.hardware.gemm, asked.room
    links = " and ".join(f"{link.bandwidth / 1e9:.3g}" for link in (asked.hardware.inside, asked.hardware.between))
    tiles = [
        ("Time of a step", show_seconds(first.time.total),
         f"{show_count(fast.rate)} {fast.unit} per second, {show_count(fast.rate / asked.devices)} per device; {fast}",
         "modelled"),
        ("Cost", f"{fast.hours:,.4g} GPU-hours", cost(asked, first), "modelled"),
        ("Memory per device", show_bytes(first.memory.total),
         f"{first.memory.total / room:.0%} of the {show_bytes(room)} that a program may take", "modelled"),
        ("Layouts weighed", f"{plan.considered:,}",
         f"all that are legal; {plan.fitting:,} fit with {spare(plan)} (modelled)", "exact"),
        ("Taken for granted", f"{links} GB/s",
         f"per device inside a node and between nodes; matmuls reach at most {gemm.top:.0%} of the peak", "modelled"),
    ]  # fmt: skip
    return tag("div", *[tile(*each) for each in tiles], cls="jx-tiles")


def _left_out(plan: Plan) -> Markup:
    why = plan.left_out
    return tag("p", "Not weighed: ", "; ".join(why), cls="jx-small") if why else Markup()


def _breakdown(plan: Plan) -> Markup:
    scale = max(each.time.total for each in plan.best)
    met = {cause for each in plan.best for cause, seconds in each.time.items() if seconds > 0}
    needed = {cause for each in plan.best for cause, size in each.memory.items() if size > 0}
    first = plan.best[0]
    key = [tag("li", swatch(of_seconds(cause), cause)) for cause in first.time if cause in met]
    sizes = [tag("li", swatch(of_bytes(cause), cause)) for cause in first.memory if cause in needed]
    rows = [_row(rank, each, scale, plan) for rank, each in enumerate(plan.best, 1)]
    room = show_bytes(plan.question.room)
    return join([
        tag("ul", tag("li", tag("b", "seconds of a step "), badge("modelled")), *key, cls="jx-key"),
        tag("ul", tag("li", tag("b", f"memory, of {room} "), badge("modelled")), *sizes, cls="jx-key"),
        tag("ol", *rows, cls="jx-plans"),
    ])  # fmt: skip


def _row(rank: int, each: Ranked, scale: float, plan: Plan) -> Markup:
    """Returns a layout: its name and why it is where it is, its seconds and its bytes by cause."""
    seconds, room = list(each.time.items()), plan.question.room
    parts = [(of_seconds(cause), f"{cause}: {show_seconds(value)}, {value / each.time.total:.1%}", value)
             for cause, value in seconds]  # fmt: skip
    bytes_ = [(of_bytes(cause), f"{cause}: {show_bytes(value)}, {value / each.memory.total:.1%}", value)
              for cause, value in each.memory.items()]  # fmt: skip
    time = tag("div", bar(parts, scale, cls="jx-stack"), _labels(seconds, scale), cls="jx-limited")
    return tag(
        "li",
        tag("div", tag("b", f"{rank}"), " ", tag("span", describe(each.candidate)), " ",
            tag("span", f"{_pace(each, plan)}; {why(each, plan)}", cls="jx-small"), cls="jx-plan"),
        time,
        tag("b", show_seconds(each.time.total)),
        bar(bytes_, max(room, each.memory.total), cls="jx-stack jx-room"),
        tag("span", show_bytes(each.memory.total), tag("span", f" {each.memory.total / room:.0%}", cls="jx-small")),
    )  # fmt: skip


def _on_host(plan: Plan) -> Markup:
    """Returns a table of what layouts have in host memory; nothing where none has anything there."""
    told = [(f"{rank}", describe(each.candidate), on_host(each)) for rank, each in enumerate(plan.best, 1)]
    cells = [row for row in told if row[-1]]
    if not cells:
        return Markup()
    words = tag("p", "Inputs of layers that wait for their backward pass there: ", badge("modelled"))
    return join([words, table("In host memory", ("", "layout", "inputs of layers"), cells, "nww")])


def _pace(each: Ranked, plan: Plan) -> str:
    """Returns throughput, MFU and bubble in a few words."""
    fast = speed(plan.question, each)
    rate, mfu, bubble = fast.cells
    return f"{rate} {fast.unit}/s, MFU {mfu}" + f", bubble {bubble}" * bool(bubble)


def _labels(seconds: Sequence[tuple[str, float]], scale: float) -> Markup:
    """Returns the seconds of those parts that have the place."""
    drawn, start = [], 0.0
    for cause, value in seconds:
        if value >= _ROOMY * scale:
            middle = percent((start + value / 2) / scale)
            drawn.append(
                tag(
                    "text",
                    show_seconds(value),
                    x=middle,
                    y="22",
                    text_anchor="middle",
                    cls=f"jx-on {of_seconds(cause)}",
                )
            )
        start += value
    return tag("svg", *drawn, cls="jx-stack jx-marks", aria_hidden="true")


def _leaner(plan: Plan) -> Markup:
    rows = leaner(plan, 8)
    if not rows:
        return tag("p", "No layout needs less memory than the chosen one.")
    first = plan.best[0]
    cells = []
    for each in rows:
        ratio = each.time.total / first.time.total
        slower = f"{ratio - 1:+.1%}" if ratio < 3 else f"{ratio:.3g} times"
        fast = speed(plan.question, each).cells
        step, size = show_seconds(each.time.total), show_bytes(each.memory.total)
        cells.append((describe(each.candidate), step, slower, *fast, size))
    words = tag("p", "With less memory than the chosen one takes, the fastest would be: ", badge("modelled"))
    unit = speed(plan.question, first).unit
    head = ("layout", "step", "against the chosen", f"{unit}/s", "MFU", "bubble", "per device")
    return join([words, table("With less memory", head, cells, "wnnnnnn")])


def _doubts(plan: Plan) -> Markup:
    first = plan.best[0]
    cells = []
    for what, other in plan.doubts.items():
        same = other.candidate == first.candidate
        cells.append((what, "the same" if same else describe(other.candidate), show_seconds(other.time.total)))
    words = tag("p", "What would be first, and its step: ", badge("modelled"))
    return join([words, table("Doubts", ("with", "first", "step"), cells, "twn")])


def _checked(checked: Sequence[Checked]) -> Markup:
    if not checked:
        return Markup()
    cells = []
    for each in checked:
        name, ranked = describe(each.ranked.candidate), each.ranked
        said = join([name, tag("div", f"refused: {each.refusal}", cls="jx-small")]) if each.refusal else name
        cells.append((
            said,
            show_seconds(ranked.time.total),
            "" if each.seconds is None else show_seconds(each.seconds),
            show_bytes(ranked.memory.total),
            "" if each.bytes is None else show_bytes(each.bytes),
        ))  # fmt: skip
    words = tag("p", "Predicted, ", badge("modelled"), ", beside what the compiler made of it: bytes are ",
                badge("compiled"), ", seconds ", badge("modelled"), " from the compiled program.")  # fmt: skip
    head = ("layout", "step, predicted", "step, replayed", "memory, predicted", "memory, compiled")
    return join([words, table("Compiled", head, cells, "wnnnn")])
