"""A plan as a page of text: the layouts, where the first one's time goes, and what the ranking hangs on."""

import numpy as np

from jaxpar.columns import fold, table, terminal_width
from jaxpar.plan.enumerate import at
from jaxpar.plan.measured.trust import expected_error, trusted
from jaxpar.plan.pages.bars import bars
from jaxpar.plan.search import CHUNKED, Plan, Question, Ranked, complexity, describe, weigh
from jaxpar.plan.speed import cost, mfu_without_mask, speed, ways_out
from jaxpar.units import show_bytes, show_count, show_seconds

_BAR = 28


def page(plan: Plan, *, colour: bool = False, width: int | None = None) -> str:
    """Returns the plan; every number in it is modelled.

    Args:
      plan: What to show.
      colour: Whether to colour the causes.
      width: Of a line, in columns; 0 is without limit, None as wide as the terminal.
    """
    width = terminal_width() if width is None else width
    drawn = bars(plan, colour=colour, width=width)
    told = f"The first one costs {cost(plan.question, plan.best[0])}."
    parts = [
        _head(plan),
        _left_out(plan),
        _table(plan, width),
        _masked(plan),
        told,
        _hopeless(plan),
        drawn,
        _causes(plan),
    ]
    parts += [_on_host(plan), _leaner(plan, width), _doubts(plan)]
    return fold("\n\n".join(part for part in parts if part), width)


def _head(plan: Plan) -> str:
    asked = plan.question
    hardware, attention = asked.hardware, asked.model.attention(asked.software)
    nodes = -(-asked.devices // hardware.per_node)
    several = "s" * (nodes > 1)
    size = show_count(asked.model.parameters).replace("G", "B")
    inside, between = (f"{link.bandwidth / 1e9:.3g}" for link in (hardware.inside, hardware.between))
    far = f" inside a node and {between} between nodes" if nodes > 1 else ""
    memory = f"memory: {show_bytes(asked.room)} {asked.why}" if asked.why else ""
    lines = [
        f"{size} parameters on {asked.devices} x {hardware.chip.name}, {nodes} node{several} of {hardware.per_node}; "
        f"{batch_of(asked)}",
        f"{plan.considered:,} layouts, {plan.fitting:,} of them fit {show_bytes(asked.room)} with {spare(plan)}; "
        "all numbers are modelled:",
        f"matmuls reach at most {hardware.gemm.top:.0%} of the peak, collectives {inside} GB/s per GPU{far}",
        f"matmuls: {hardware.gemm.source.partition(';')[0]}; links: {hardware.source.partition(';')[0]}",
        f"expected error of a step: {expected_error(asked, plan.best[0])}",
        memory,
        f"attention: {attention}" if attention else "",
    ]
    return "\n".join(line for line in lines if line)


def on_host(each: Ranked) -> str:
    """Returns what a layout has in host memory, and its time over PCIe each way; nothing where it has nothing there."""
    if not each.host:
        return ""
    waits = show_seconds(each.time.get("host", 0.0))
    there = f"{show_seconds(each.over_pcie)} each way over PCIe, {waits} of it waited for"
    return f"{show_bytes(each.host)} per device, {there if each.over_pcie else 'how fast is not known'}"


def _on_host(plan: Plan) -> str:
    """Returns the same of all layouts that are shown."""
    lines = [f"  {rank}: {away}" for rank, each in enumerate(plan.best, start=1) if (away := on_host(each))]
    return "\n".join(["In host memory:", *lines]) if lines else ""


def _left_out(plan: Plan) -> str:
    why = plan.left_out
    return "\n".join(["Not among them:", *[f"  {each}" for each in why]]) if why else ""


def spare(plan: Plan) -> str:
    """Returns how much of the memory layouts leave free, as a person reads it."""
    least, chunked = plan.question.spare, bool(np.any(plan.points.layouts.chunks > 1))
    return f"{least:.0%} to spare" + f", interleaved pipelines with {least + CHUNKED:.0%}" * chunked


def batch_of(asked: Question) -> str:
    """Returns the batch of a step in words: `128 examples of 4,096 tokens per step`."""
    unit, each = asked.model.unit
    return f"{asked.rows} examples{f' of {each:,} {unit}' * (each > 1)} per step"


def _masked(plan: Plan) -> str:
    """Returns which attention an MFU counts; nothing where none is masked."""
    less = mfu_without_mask(plan.question, plan.best[0])
    if not less:
        return ""
    return f"MFU counts all of attention, masked or not; of the causal half alone the first one's is {less:.1%}."


def _table(plan: Plan, width: int) -> str:
    return _rows(plan, list(plan.best), [why(each, plan) for each in plan.best], width, ranks=True)


def _rows(plan: Plan, layouts: list[Ranked], words: list[str], width: int, *, ranks: bool = False) -> str:
    """Returns layouts one below the other: step, throughput, MFU, bubble where there is one, memory, and words."""
    speeds = [speed(plan.question, each) for each in layouts]
    head = ("layout", "step", f"{speeds[0].unit}/s", "MFU", "bubble", "per device", "against the first" * any(words))
    rows = [
        (describe(each.candidate), show_seconds(each.time.total), *fast.cells, show_bytes(each.memory.total), word)
        for each, fast, word in zip(layouts, speeds, words, strict=True)
    ]
    keep = [column for column in range(len(head)) if column != 4 or any(row[4] for row in rows)]
    numbers = [[f"{rank or '':>3}"] if ranks else [] for rank in range(len(rows) + 1)]
    cells = [
        [*number, *(row[i] if i in (0, len(head) - 1) else f"{row[i]:>6}" for i in keep)]
        for number, row in zip(numbers, (head, *rows), strict=True)
    ]
    first, last = int(ranks), len(cells[0]) - 1
    right = [column for column in range(last) if column != first]
    return table(cells, right=right, indent="" if ranks else "  ", width=width)


def hopeless(plan: Plan) -> tuple[str, list[str]]:
    """Returns why nobody should pay for the first choice, and what would help, in words; "" where it may do."""
    fast = speed(plan.question, plan.best[0])
    if not fast.hopeless:
        return "", []
    ways = [
        f"{way.what}: {way.speed}{', still hopeless' * way.speed.hopeless}; {describe(way.first.candidate)}"
        for way in ways_out(plan.question, plan.best[0])
    ]
    return f"hopeless as it is asked: {fast}", ways


def _hopeless(plan: Plan) -> str:
    said, ways = hopeless(plan)
    if not said:
        return ""
    help_ = ["What would help:", *[f"  {way}" for way in ways]]
    if not ways:
        help_ = ["More examples a step, fewer devices and wider context axes were tried: none helps."]
    return "\n".join([f"The first choice is {said}.", *help_])


def why(each: Ranked, plan: Plan) -> str:
    """Returns why the first one is first, or what costs another one more than the first."""
    first = plan.best[0]
    if each is first:
        if plan.fastest.candidate == each.candidate:
            return "the fastest"
        lost = each.time.total / plan.fastest.time.total - 1
        what = "simpler" if complexity(each.candidate) < complexity(plan.fastest.candidate) else "less memory"
        return f"{what} than the fastest, {describe(plan.fastest.candidate)}, and {lost:.1%} slower"
    more = [(cause, seconds) for cause, seconds in each.slower(first)[:2] if seconds >= 1e-5 * first.time.total]
    gap = each.time.total / first.time.total - 1
    equal = ", equal" * (abs(gap) <= trusted(plan.question, first).apart)
    if gap < 0:
        return f"{gap:+.1%}{equal}, but " + (
            "less simple" if complexity(each.candidate) > complexity(first.candidate) else "more memory"
        )
    return f"{gap:+.1%}{equal}" + "".join(f", {cause} +{show_seconds(seconds)}" for cause, seconds in more)


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
    """Returns the Pareto front in a few lines: what less memory would cost."""
    rows = leaner(plan, 5)
    if not rows:
        return ""
    return "\n".join(["With less memory, the fastest would be:", _rows(plan, rows, [""] * len(rows), width)])


def leaner(plan: Plan, count: int) -> list[Ranked]:
    """Returns layouts of the Pareto front that need less memory than the first: in equal steps, and the leanest."""
    limits = np.linspace(plan.best[0].memory.total, 0, count, endpoint=False)
    found = np.unique(np.concatenate([plan.points.under(limits), plan.points.pareto[-1:]]))
    found = found[np.argsort(plan.points.seconds[found], kind="stable")]
    less = found[plan.points.bytes[found] < plan.best[0].memory.total]
    return [weigh(plan.question, at(plan.points.layouts, i)) for i in less.tolist()]


def _doubts(plan: Plan) -> str:
    first = plan.best[0].candidate
    lines = []
    for what, other in plan.doubts.items():
        same = other.candidate == first
        lines.append(f"  {what}: {'the same' if same else describe(other.candidate)}, {show_seconds(other.time.total)}")
    return "\n".join(["The first one, if an assumption is wrong:", *lines])
