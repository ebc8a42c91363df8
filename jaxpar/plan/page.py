"""A plan as a page of text: the layouts, where the first one's time goes, and what the ranking hangs on."""

from dataclasses import fields

import numpy as np

from jaxpar.plan.bars import bars
from jaxpar.plan.legal import at
from jaxpar.plan.search import CHUNKED, Plan, Question, Ranked, complexity, describe, weigh
from jaxpar.units import show_bytes, show_count, show_seconds

_BAR = 28


def page(plan: Plan, *, colour: bool = False) -> str:
    """Returns the plan, about a screen wide; every number in it is modelled.

    Args:
      plan: What to show.
      colour: Whether to colour the causes.
    """
    drawn = bars(plan, colour=colour)
    parts = [_head(plan), _left_out(plan), _table(plan), drawn, _causes(plan), _leaner(plan), _doubts(plan)]
    return "\n\n".join(part for part in parts if part)


def _head(plan: Plan) -> str:
    asked = plan.question
    hardware = asked.hardware
    nodes = -(-asked.devices // hardware.per_node)
    several = "s" * (nodes > 1)
    size = show_count(asked.model.parameters).replace("G", "B")
    inside, between = (f"{link.bandwidth / 1e9:.3g}" for link in (hardware.inside, hardware.between))
    far = f" inside a node and {between} between nodes" if nodes > 1 else ""
    return (
        f"{size} parameters on {asked.devices} x {hardware.chip.name}, {nodes} node{several} of {hardware.per_node}; "
        f"{batch_of(asked)}\n"
        f"{plan.considered:,} layouts, {plan.fitting:,} of them fit {show_bytes(asked.room)} with {spare(plan)}; "
        f"all numbers are modelled:\nproducts reach at most {hardware.gemm.top:.0%} of the peak, collectives "
        f"{inside} GB/s per GPU{far}\nproducts: {hardware.gemm.source.partition(';')[0]}; links: "
        f"{hardware.source.partition(';')[0]}" + f"\nmemory: {show_bytes(asked.room)} {asked.why}" * bool(asked.why)
    )


def _left_out(plan: Plan) -> str:
    why = plan.question.left_out
    return "\n".join(["Not among them:", *[f"  {each}" for each in why]]) if why else ""


def spare(plan: Plan) -> str:
    """Returns how much of the memory layouts leave free, as a person reads it."""
    least, chunked = plan.question.spare, bool(np.any(plan.points.layouts.chunks > 1))
    return f"{least:.0%} to spare" + f", interleaved pipelines with {least + CHUNKED:.0%}" * chunked


def batch_of(asked: Question) -> str:
    """Returns the batch of a step in words: `128 rows of 4,096 tokens per step`."""
    unit, each = asked.model.unit
    return f"{asked.rows} rows{f' of {each:,} {unit}' * (each > 1)} per step"


def _table(plan: Plan) -> str:
    width = max(len(describe(each.candidate)) for each in plan.best)
    lines = []
    for rank, each in enumerate(plan.best, 1):
        lines.append(
            f"{rank:>3}  {describe(each.candidate):<{width}}  {show_seconds(each.time.total):>9}  "
            f"{show_bytes(each.memory.total):>10}  {why(each, plan)}".rstrip()
        )
    return "\n".join([f"{'':>3}  {'layout':<{width}}  {'step':>9}  {'per device':>10}  against the first", *lines])


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
    if gap < 0:
        return f"{gap:+.1%}, but " + (
            "less simple" if complexity(each.candidate) > complexity(first.candidate) else "more memory"
        )
    return f"{gap:+.1%}" + "".join(f", {cause} +{show_seconds(seconds)}" for cause, seconds in more)


def _causes(plan: Plan) -> str:
    first = plan.best[0]
    lines = ["Where the first one's step goes:"]
    for part, unit in ((first.time, show_seconds), (first.memory, show_bytes)):
        rows = [(each.name, getattr(part, each.name)) for each in fields(part)]
        scale = max(value for _, value in rows) or 1
        lines += [
            f"  {name:<12} {unit(value):>10}  {'█' * max(1, round(_BAR * value / scale))}"
            for name, value in rows
            if value > 0
        ]
        lines.append("")
    return "\n".join(lines[:-1])


def _leaner(plan: Plan) -> str:
    """Returns the front in a few lines: what less memory would cost."""
    rows = leaner(plan, 5)
    width = max([len(describe(each.candidate)) for each in rows], default=0)
    lines = []
    for each in rows:
        numbers = f"{show_seconds(each.time.total):>9}  {show_bytes(each.memory.total):>10}"
        lines.append(f"  {describe(each.candidate):<{width}}  {numbers}")
    return "\n".join(["With less memory, the fastest would be:", *lines]) if rows else ""


def leaner(plan: Plan, count: int) -> list[Ranked]:
    """Returns layouts of the front that need less memory than the first: in equal steps, and the leanest."""
    limits = np.linspace(plan.best[0].memory.total, 0, count, endpoint=False)
    found = np.unique(np.concatenate([plan.points.under(limits), plan.points.front[-1:]]))
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
