"""A plan as text: the layouts, the time of the first by cause as bars, and the sensitivity of the ranking.

Each bar is a layout's step time by cause, or its share of a device's memory. Each column is the letter of its cause, so
that the bars can be read without colours. The model's letters are here, each technique has its own; all drawings of a
plan share letters and colours.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from jaxpar.columns import fold, table, terminal_width
from jaxpar.html.markup import Markup
from jaxpar.plan.causes import PALE, Style
from jaxpar.plan.enumeration import select_one
from jaxpar.plan.measurements.prediction_errors import estimate_for, expected_error
from jaxpar.plan.search import CHUNK_SPARE, Plan, Question, Ranked, complexity, describe, predict
from jaxpar.plan.speed import cost, improvements, mfu_without_mask, speed
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.units import show_bytes, show_count, show_seconds

_TIME, _MEMORY = 56, 16  # columns of the longest bar
_BESIDE = 5 + 2 + 8 + 2 + _MEMORY + 5  # columns of a line besides the bar of time
_ON_DARK = f"light-dark({PALE}, #10151b)"
SECONDS = {  # colours of the causes of time: computation is blue
    "matmuls": Style(letter="M", shade=25, ink=231, light="#1f4e79", dark="#4f93d6", text=_ON_DARK),
    "attention": Style(letter="A", shade=74, light="#3f87bd", dark="#86bde8", text=_ON_DARK),
    "elementwise": Style(letter="E", shade=153, light="#a9cfea", dark="#c4e0f5"),
    "recompute": Style(letter="R", shade=140, light="#7264ad", dark="#a698e2", text=_ON_DARK),
    "stragglers": Style(letter="W", shade=244, light="#c9ced6", dark="#8b93a0"),
    "host": Style(letter="H", shade=137, light="#a17a4c", dark="#c9a679"),
    "optimizer": Style(letter="O", shade=78, light="#2f8f6b", dark="#58c79d"),
}
# causes of a model's memory, to the classes of the inspector's page
BYTES = {"parameters": 0, "gradients": 5, "optimizer": 1, "state": 2, "activations": 7, "logits": 8, "working": 6}
_BAR = 28


def bars(plan: Plan, *, colour: bool, width: int = 0) -> str:
    """Returns a line per layout: its step time by cause, on a common scale, and its share of a device's memory.

    Args:
      plan: The plan.
      colour: Whether to colour the causes.
      width: Width of a line in columns; 0 means unlimited.
    """
    longest = min(_TIME, width - _BESIDE) if width else _TIME
    scale, room = max(entry.time.total for entry in plan.best), plan.question.memory_limit
    lines, causes, drawn_as = [], set(), styles()
    for rank, entry in enumerate(plan.best, 1):
        parts = list(entry.time.items())
        causes |= {cause for cause, seconds in parts if seconds > 0}
        columns = lengths([seconds for _, seconds in parts], scale, longest)
        strip = "".join(
            _run(drawn_as[cause], count, colour=colour) for (cause, _), count in zip(parts, columns, strict=True)
        )
        full = round(_MEMORY * entry.memory.total / room)
        lines.append(
            f"{rank:>3}  {strip}{' ' * (longest - sum(columns))}  {show_seconds(entry.time.total):>8}  "
            f"{'█' * full}{'░' * (_MEMORY - full)} {entry.memory.total / room:>4.0%}"
        )
    shown_causes = [cause for cause in plan.best[0].time if cause in causes]
    legend: list[list[str]] = [[]]
    for cause in shown_causes:  # fills a line with entries: a letter, a blank, the cause, two blanks
        if width and sum(len(entry) + 4 for entry in [*legend[-1], cause]) > width - 5:
            legend.append([])
        legend[-1].append(cause)
    words = ["  ".join(f"{_run(drawn_as[cause], 1, colour=colour)} {cause}" for cause in line) for line in legend]
    head = "Where the step goes, and how much of the memory it takes (modelled):"
    return "\n".join([head, *(f"     {line}" for line in words), *lines])


def lengths(parts: Sequence[float], scale: float, columns: int) -> list[int]:
    """Returns the columns of each part; their sum is the rounded length of the whole bar.

    >>> lengths([1.0, 1.0, 1.0], scale=3.0, columns=10)
    [3, 4, 3]
    """
    edges, position = [0], 0.0
    for part in parts:
        position += part
        edges.append(round(position / scale * columns))
    return [end - start for start, end in pairwise(edges)]


def _run(look: Style, count: int, *, colour: bool) -> str:
    if not colour or not count:
        return look.letter * count
    return f"\033[38;5;{look.ink};48;5;{look.shade}m{look.letter * count}\033[0m"


def styles() -> dict[str, Style]:
    """Maps the causes of time, and the causes of bytes of techniques, to letters and colours."""
    return SECONDS | {cause: look for technique in TECHNIQUES.values() for cause, look in technique.styles.items()}


def css() -> Markup:
    """Returns CSS classes with these colours: `jx-t-` and the cause."""
    rows = (
        f"  .jx-t-{cause} {{ --c: light-dark({look.light}, {look.dark}); --on: {look.text}; }}\n"
        for cause, look in styles().items()
    )
    return Markup("\n" + "".join(rows))


def seconds_class(cause: str) -> str:
    """Returns the CSS class of a cause of seconds."""
    return f"jx-t-{cause}"


def bytes_class(cause: str) -> str:
    """Returns the CSS class of a cause of bytes: the inspector's, or a technique's."""
    return f"jx-c{BYTES[cause]}" if cause in BYTES else seconds_class(cause)


def page(plan: Plan, *, colour: bool = False, width: int | None = None) -> str:
    """Returns the plan as text; all numbers are modelled.

    Args:
      plan: The plan.
      colour: Whether to colour the causes.
      width: Width of a line in columns; 0 means unlimited, None the terminal's width.
    """
    width = terminal_width() if width is None else width
    chart = bars(plan, colour=colour, width=width)
    cost_line = f"The first one costs {cost(plan.question, plan.best[0])}."
    parts = [
        _head(plan),
        _left_out(plan),
        _table(plan, width),
        _masked(plan),
        cost_line,
        _hopeless(plan),
        chart,
        _causes(plan),
    ]
    parts += [_on_host(plan), _leaner(plan, width), _doubts(plan)]
    return fold("\n\n".join(part for part in parts if part), width)


def _head(plan: Plan) -> str:
    question = plan.question
    hardware, attention = question.hardware, question.costs.attention
    nodes = -(-question.devices // hardware.per_node)
    plural = "s" * (nodes > 1)
    size = show_count(question.model.parameters).replace("G", "B")
    inside_rate, between_rate = (f"{link.bandwidth / 1e9:.3g}" for link in (hardware.inside, hardware.between))
    tiers = f" inside a node and {between_rate} between nodes" if nodes > 1 else ""
    memory = f"memory: {show_bytes(question.memory_limit)} {question.memory_source}" if question.memory_source else ""
    lines = [
        f"{size} parameters on {question.devices} x {hardware.chip.name}, {nodes} node{plural} of {hardware.per_node}; "
        f"{batch_text(question)}",
        f"{plan.considered:,} layouts, {plan.fitting:,} of them fit {show_bytes(question.memory_limit)} with "
        f"{spare(plan)}; "
        "all numbers are modelled:",
        f"matmuls reach at most {hardware.gemm.top:.0%} of the peak, collectives {inside_rate} GB/s per GPU{tiers}",
        f"matmuls: {hardware.gemm.source.partition(';')[0]}; links: {hardware.source.partition(';')[0]}",
        f"expected error of a step: {expected_error(question, plan.best[0])}",
        memory,
        f"attention: {attention}" if attention else "",
    ]
    return "\n".join(line for line in lines if line)


def host_memory(ranked: Ranked) -> str:
    """Returns a layout's bytes in host memory and their time over PCIe each way, as text; "" if there are none."""
    if not ranked.host:
        return ""
    exposed = show_seconds(ranked.time.get("host", 0.0))
    copy_times = f"{show_seconds(ranked.pcie_copy)} each way over PCIe, {exposed} of it waited for"
    return f"{show_bytes(ranked.host)} per device, {copy_times if ranked.pcie_copy else 'how fast is not known'}"


def _on_host(plan: Plan) -> str:
    lines = [f"  {rank}: {line}" for rank, ranked in enumerate(plan.best, start=1) if (line := host_memory(ranked))]
    return "\n".join(["In host memory:", *lines]) if lines else ""


def _left_out(plan: Plan) -> str:
    reasons = plan.exclusions
    return "\n".join(["Not among them:", *[f"  {reason}" for reason in reasons]]) if reasons else ""


def spare(plan: Plan) -> str:
    """Returns the share of the memory that layouts leave free, as text."""
    share, chunked = plan.question.spare, bool(np.any(plan.points.layouts.chunks > 1))
    if not share:
        return "no memory to spare, so a layout may not fit if its prediction is too low: --verify 1 compiles the first"
    return f"{share:.0%} to spare" + f", interleaved pipelines with {share + CHUNK_SPARE:.0%}" * chunked


def batch_text(question: Question) -> str:
    """Returns the batch of a step as text: `128 examples of 4,096 tokens per step`."""
    unit, per_example = question.model.unit
    return f"{question.rows} examples{f' of {per_example:,} {unit}' * (per_example > 1)} per step"


def _masked(plan: Plan) -> str:
    mfu = mfu_without_mask(plan.question, plan.best[0])
    if not mfu:
        return ""
    return f"MFU counts all of attention, masked or not; of the causal half alone the first one's is {mfu:.1%}."


def _table(plan: Plan, width: int) -> str:
    return _rows(plan, list(plan.best), [rank_reason(ranked, plan) for ranked in plan.best], width, ranks=True)


def _rows(plan: Plan, layouts: list[Ranked], words: list[str], width: int, *, ranks: bool = False) -> str:
    """Returns a table of layouts: step, throughput, MFU, bubble if any, memory, and a remark."""
    speeds = [speed(plan.question, entry) for entry in layouts]
    head = ("layout", "step", f"{speeds[0].unit}/s", "MFU", "bubble", "per device", "against the first" * any(words))
    rows = [
        (describe(entry.candidate), show_seconds(entry.time.total), *pace.cells, show_bytes(entry.memory.total), word)
        for entry, pace, word in zip(layouts, speeds, words, strict=True)
    ]
    columns = [column for column in range(len(head)) if column != 4 or any(row[4] for row in rows)]
    numbers = [[f"{rank or '':>3}"] if ranks else [] for rank in range(len(rows) + 1)]
    cells = [
        [*number, *(row[i] if i in (0, len(head) - 1) else f"{row[i]:>6}" for i in columns)]
        for number, row in zip(numbers, (head, *rows), strict=True)
    ]
    first, last = int(ranks), len(cells[0]) - 1
    right = [column for column in range(last) if column != first]
    return table(cells, right=right, indent="" if ranks else "  ", width=width)


def hopeless(plan: Plan) -> tuple[str, list[str]]:
    """Returns the reason why the first layout is hopeless, and changes that would help; ("", []) if it is not."""
    first_speed = speed(plan.question, plan.best[0])
    if not first_speed.hopeless:
        return "", []
    changes = [
        f"{change.option}: {change.speed}{', still hopeless' * change.speed.hopeless}; "
        f"{describe(change.first.candidate)}"
        for change in improvements(plan.question, plan.best[0])
    ]
    return f"hopeless as it is asked: {first_speed}", changes


def _hopeless(plan: Plan) -> str:
    reason, changes = hopeless(plan)
    if not reason:
        return ""
    help_ = ["What would help:", *[f"  {change}" for change in changes]]
    if not changes:
        help_ = ["More examples a step, fewer devices and wider context axes were tried: none helps."]
    return "\n".join([f"The first choice is {reason}.", *help_])


def rank_reason(ranked: Ranked, plan: Plan) -> str:
    """Returns the reason of a layout's rank: why the first is first, or the causes that cost another one more."""
    first = plan.best[0]
    if ranked is first:
        if plan.fastest.candidate == ranked.candidate:
            return "the fastest"
        slowdown = ranked.time.total / plan.fastest.time.total - 1
        advantage = "simpler" if complexity(ranked.candidate) < complexity(plan.fastest.candidate) else "less memory"
        return f"{advantage} than the fastest, {describe(plan.fastest.candidate)}, and {slowdown:.1%} slower"
    causes = [
        (cause, seconds) for cause, seconds in ranked.slower_causes(first)[:2] if seconds >= 1e-5 * first.time.total
    ]
    gap = ranked.time.total / first.time.total - 1
    equal = ", equal" * (abs(gap) <= estimate_for(plan.question, first).resolution)
    if gap < 0:
        return f"{gap:+.1%}{equal}, but " + (
            "less simple" if complexity(ranked.candidate) > complexity(first.candidate) else "more memory"
        )
    return f"{gap:+.1%}{equal}" + "".join(f", {cause} +{show_seconds(seconds)}" for cause, seconds in causes)


def _causes(plan: Plan) -> str:
    first = plan.best[0]
    lines = ["Where the first one's step goes:"]
    for part, unit in ((first.time, show_seconds), (first.memory, show_bytes)):
        scale = max(part.values()) or 1
        lines += [
            f"  {name:<12} {unit(value):>10}  {'█' * max(1, round(_BAR * value / scale))}"
            for name, value in part.items()
            if value > 0
        ]
        lines.append("")
    return "\n".join(lines[:-1])


def _leaner(plan: Plan, width: int) -> str:
    """Returns a table of layouts of the Pareto front with less memory than the first."""
    rows = smaller_layouts(plan, 5)
    if not rows:
        return ""
    return "\n".join(["With less memory, the fastest would be:", _rows(plan, rows, [""] * len(rows), width)])


def smaller_layouts(plan: Plan, count: int) -> list[Ranked]:
    """Returns layouts of the Pareto front that use less memory than the first, at equal steps, and the smallest one."""
    limits = np.linspace(plan.best[0].memory.total, 0, count, endpoint=False)
    indices = np.unique(np.concatenate([plan.points.fastest_below(limits), plan.points.pareto[-1:]]))
    indices = indices[np.argsort(plan.points.seconds[indices], kind="stable")]
    smaller = indices[plan.points.bytes[indices] < plan.best[0].memory.total]
    return [predict(plan.question, select_one(plan.points.layouts, i)) for i in smaller.tolist()]


def _doubts(plan: Plan) -> str:
    first = plan.best[0].candidate
    lines = []
    for change, layout in plan.sensitivity.items():
        same = layout.candidate == first
        lines.append(
            f"  {change}: {'the same' if same else describe(layout.candidate)}, {show_seconds(layout.time.total)}"
        )
    return "\n".join(["The best layout, if an assumption is wrong:", *lines])
