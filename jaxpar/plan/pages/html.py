"""A plan as one HTML file: the first layout, step time by cause, memory against time, and sensitivity.

`DisplayedPlan` is a plan with its representations: text when printed, a picture in a notebook, a page in a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from jaxpar.files import write_page
from jaxpar.html.markup import (
    HOW,
    Markup,
    badge,
    bar,
    document,
    in_ascii,
    join,
    percent,
    style,
    swatch,
    table,
    tag,
    tile,
)
from jaxpar.plan.measurements.prediction_errors import expected_error
from jaxpar.plan.pages.pareto_svg import scatter
from jaxpar.plan.pages.terminal import (
    batch_text,
    bytes_class,
    css,
    hopeless,
    host_memory,
    page,
    rank_reason,
    seconds_class,
    smaller_layouts,
    spare,
)
from jaxpar.plan.search import Plan, Ranked, describe
from jaxpar.plan.speed import cost, speed
from jaxpar.plan.validation import CompiledLayout
from jaxpar.units import show_bytes, show_count, show_seconds

_ROOMY = 0.16  # share of the width from which a part is labelled with its seconds


def write(plan: Plan, *, title: str, command: str = "", checked: Sequence[CompiledLayout] = ()) -> str:
    """Returns the HTML page.

    Args:
      plan: The plan.
      title: Title of the page; any text.
      command: Command that trains the first layout.
      checked: Compiled layouts.
    """
    top, sections, legend = _parts(plan, command=command, checked=checked)
    section_tags = [tag("section", tag("h2", name), body) for name, body in sections]
    return document(title, tag("style", css()), *top, *section_tags, legend)


def fragment(plan: Plan, *, title: str, command: str = "") -> str:
    """Returns the plan as HTML for a notebook: all sections but the first are folded."""
    top, sections, legend = _parts(plan, command=command)
    folded = [
        tag("details", tag("summary", name), body, cls="jx-section", open=None if number else "")
        for number, (name, body) in enumerate(sections)
    ]
    head = [tag("style", Markup(style()), css()), tag("div", title, cls="jx-title")]
    return in_ascii(tag("div", *head, *top, *folded, legend, cls="jaxpar jx-fragment"))


def _parts(
    plan: Plan, *, command: str, checked: Sequence[CompiledLayout] = ()
) -> tuple[list[Markup], list[tuple[str, Markup]], Markup]:
    """Returns the top, (name, body) of each section, and the legend."""
    sections = [
        ("Where a step goes", _breakdown(plan)),
        ("In host memory", _on_host(plan)),
        ("Memory against time", join([scatter(plan), _leaner(plan)])),
        ("If an assumption is wrong", _doubts(plan)),
        ("Compiled", _checked(checked)),
        ("Train it so", tag("div", tag("code", command), cls="jx-scroll jx-command") if command else Markup()),
    ]
    top = [_where(plan), _verdict(plan), _numbers(plan), _left_out(plan)]
    origins = [origin for origin in HOW if origin != "compiled" or checked]
    legend = tag("ul", *[tag("li", badge(origin), f" {HOW[origin]}") for origin in origins], cls="jx-key jx-legend")
    return top, [(name, body) for name, body in sections if body], legend


def _where(plan: Plan) -> Markup:
    question = plan.question
    hardware = question.hardware
    nodes = -(-question.devices // hardware.per_node)
    words = [
        f"{show_count(question.model.parameters).replace('G', 'B')} parameters",
        f"{question.devices} × {hardware.chip.name}",
        f"{nodes} node{'s' * (nodes > 1)} of {min(hardware.per_node, question.devices)}",
        batch_text(question),
        f"expected error of a step: {expected_error(question, plan.best[0])}",
        *[f"attention: {words}" for words in [question.costs.attention] if words],
    ]
    return tag("p", " · ".join(words), cls="jx-where")


def _verdict(plan: Plan) -> Markup:
    first = plan.best[0]
    name = tag("strong", describe(first.candidate))
    reason, ways = hopeless(plan)
    if not reason:
        return tag("div", name, tag("span", rank_reason(first, plan)), cls="jx-verdict jx-fits")
    head = tag("div", name, tag("span", reason), cls="jx-verdict jx-over")
    help_ = [tag("p", "What would help: ", badge("modelled")), tag("ul", *[tag("li", way) for way in ways])]
    return join([head, *help_ * bool(ways)])


def _numbers(plan: Plan) -> Markup:
    first, question = plan.best[0], plan.question
    fast = speed(question, first)
    gemm, room = question.hardware.gemm, question.memory_limit
    links = " and ".join(
        f"{link.bandwidth / 1e9:.3g}" for link in (question.hardware.inside, question.hardware.between)
    )
    tiles = [
        ("Time of a step", show_seconds(first.time.total),
         f"{show_count(fast.rate)} {fast.unit} per second, "
         f"{show_count(fast.rate / question.devices)} per device; {fast}",
         "modelled"),
        ("Cost", f"{fast.hours:,.4g} GPU-hours", cost(question, first), "modelled"),
        ("Memory per device", show_bytes(first.memory.total),
         f"{first.memory.total / room:.0%} of the {show_bytes(room)} that a program may take", "modelled"),
        ("Layouts weighed", f"{plan.considered:,}",
         f"all that are legal; {plan.fitting:,} fit with {spare(plan)} (modelled)", "exact"),
        ("Taken for granted", f"{links} GB/s",
         f"per device inside a node and between nodes; matmuls reach at most {gemm.top:.0%} of the peak", "modelled"),
    ]  # fmt: skip
    return tag("div", *[tile(*entry) for entry in tiles], cls="jx-tiles")


def _left_out(plan: Plan) -> Markup:
    reasons = plan.exclusions
    return tag("p", "Not weighed: ", "; ".join(reasons), cls="jx-small") if reasons else Markup()


def _breakdown(plan: Plan) -> Markup:
    scale = max(ranked.time.total for ranked in plan.best)
    causes = {cause for ranked in plan.best for cause, seconds in ranked.time.items() if seconds > 0}
    memory_causes = {cause for ranked in plan.best for cause, size in ranked.memory.items() if size > 0}
    first = plan.best[0]
    key = [tag("li", swatch(seconds_class(cause), cause)) for cause in first.time if cause in causes]
    sizes = [tag("li", swatch(bytes_class(cause), cause)) for cause in first.memory if cause in memory_causes]
    rows = [_row(rank, ranked, scale, plan) for rank, ranked in enumerate(plan.best, 1)]
    room = show_bytes(plan.question.memory_limit)
    return join([
        tag("ul", tag("li", tag("b", "seconds of a step "), badge("modelled")), *key, cls="jx-key"),
        tag("ul", tag("li", tag("b", f"memory, of {room} "), badge("modelled")), *sizes, cls="jx-key"),
        tag("ol", *rows, cls="jx-plans"),
    ])  # fmt: skip


def _row(rank: int, ranked: Ranked, scale: float, plan: Plan) -> Markup:
    """Returns a layout: its name and the reason of its rank, its seconds and its bytes by cause."""
    seconds, room = list(ranked.time.items()), plan.question.memory_limit
    parts = [(seconds_class(cause), f"{cause}: {show_seconds(value)}, {value / ranked.time.total:.1%}", value)
             for cause, value in seconds]  # fmt: skip
    bytes_ = [(bytes_class(cause), f"{cause}: {show_bytes(value)}, {value / ranked.memory.total:.1%}", value)
              for cause, value in ranked.memory.items()]  # fmt: skip
    time = tag("div", bar(parts, scale, cls="jx-stack"), _labels(seconds, scale), cls="jx-limited")
    return tag(
        "li",
        tag("div", tag("b", f"{rank}"), " ", tag("span", describe(ranked.candidate)), " ",
            tag("span", f"{_pace(ranked, plan)}; {rank_reason(ranked, plan)}", cls="jx-small"), cls="jx-plan"),
        time,
        tag("b", show_seconds(ranked.time.total)),
        bar(bytes_, max(room, ranked.memory.total), cls="jx-stack jx-room"),
        tag("span", show_bytes(ranked.memory.total), tag("span", f" {ranked.memory.total / room:.0%}", cls="jx-small")),
    )  # fmt: skip


def _on_host(plan: Plan) -> Markup:
    rows = [(f"{rank}", describe(ranked.candidate), host_memory(ranked)) for rank, ranked in enumerate(plan.best, 1)]
    cells = [row for row in rows if row[-1]]
    if not cells:
        return Markup()
    words = tag("p", "Inputs of layers that wait for their backward pass there: ", badge("modelled"))
    return join([words, table("In host memory", ("", "layout", "inputs of layers"), cells, "nww")])


def _pace(ranked: Ranked, plan: Plan) -> str:
    fast = speed(plan.question, ranked)
    rate, mfu, bubble = fast.cells
    return f"{rate} {fast.unit}/s, MFU {mfu}" + f", bubble {bubble}" * bool(bubble)


def _labels(seconds: Sequence[tuple[str, float]], scale: float) -> Markup:
    labels, start = [], 0.0
    for cause, value in seconds:
        if value >= _ROOMY * scale:
            middle = percent((start + value / 2) / scale)
            labels.append(
                tag(
                    "text",
                    show_seconds(value),
                    x=middle,
                    y="22",
                    text_anchor="middle",
                    cls=f"jx-on {seconds_class(cause)}",
                )
            )
        start += value
    return tag("svg", *labels, cls="jx-stack jx-marks", aria_hidden="true")


def _leaner(plan: Plan) -> Markup:
    rows = smaller_layouts(plan, 8)
    if not rows:
        return tag("p", "No layout needs less memory than the chosen one.")
    first = plan.best[0]
    cells = []
    for ranked in rows:
        ratio = ranked.time.total / first.time.total
        slower = f"{ratio - 1:+.1%}" if ratio < 3 else f"{ratio:.3g} times"
        fast = speed(plan.question, ranked).cells
        step, size = show_seconds(ranked.time.total), show_bytes(ranked.memory.total)
        cells.append((describe(ranked.candidate), step, slower, *fast, size))
    words = tag("p", "With less memory than the chosen one takes, the fastest would be: ", badge("modelled"))
    unit = speed(plan.question, first).unit
    head = ("layout", "step", "against the chosen", f"{unit}/s", "MFU", "bubble", "per device")
    return join([words, table("With less memory", head, cells, "wnnnnnn")])


def _doubts(plan: Plan) -> Markup:
    first = plan.best[0]
    cells = []
    for assumption, ranked in plan.sensitivity.items():
        same = ranked.candidate == first.candidate
        cells.append((assumption, "the same" if same else describe(ranked.candidate), show_seconds(ranked.time.total)))
    words = tag("p", "What would be first, and its step: ", badge("modelled"))
    return join([words, table("Doubts", ("with", "first", "step"), cells, "twn")])


def _checked(checked: Sequence[CompiledLayout]) -> Markup:
    if not checked:
        return Markup()
    cells = []
    for compiled in checked:
        name, ranked = describe(compiled.ranked.candidate), compiled.ranked
        label = join([name, tag("div", f"refused: {compiled.refusal}", cls="jx-small")]) if compiled.refusal else name
        cells.append((
            label,
            show_seconds(ranked.time.total),
            "" if compiled.seconds is None else show_seconds(compiled.seconds),
            show_bytes(ranked.memory.total),
            "" if compiled.bytes is None else show_bytes(compiled.bytes),
        ))  # fmt: skip
    words = tag("p", "Predicted, ", badge("modelled"), ", beside what the compiler made of it: bytes are ",
                badge("compiled"), ", seconds ", badge("modelled"), " from the compiled program.")  # fmt: skip
    head = ("layout", "step, predicted", "step, replayed", "memory, predicted", "memory, compiled")
    return join([words, table("Compiled", head, cells, "wnnnn")])


@dataclass(frozen=True, kw_only=True)
class DisplayedPlan(Plan):
    """A plan with its pages; further fields are those of `Plan`.

    Attributes:
      title: Title of its page.
      command: Command that trains the first layout.
    """

    title: str = "a plan"
    command: str = ""

    @classmethod
    def from_plan(cls, plan: Plan, *, title: str, command: str) -> "DisplayedPlan":
        """Adds title and command to a plan."""
        values = {entry.name: getattr(plan, entry.name) for entry in fields(Plan)}
        return cls(**values, title=title, command=command)

    def __repr__(self) -> str:
        first = self.best[0]
        return f"<plan: {self.fitting:,} of {self.considered:,} layouts fit; first {describe(first.candidate)}>"

    def __str__(self) -> str:
        return page(self)

    def _repr_html_(self) -> str:
        return fragment(self, title=self.title, command=self.command)

    def html(self, path: str | Path | None = None) -> str:
        """Returns the plan as one self-contained HTML file, and writes it to `path` if given."""
        text = write(self, title=self.title, command=self.command)
        if path is not None:
            write_page(path, text)
        return text
