"""Compares the published decision table with the cost model.

model, hardware ──► search ──► plan ──► advise: the row that fires, and the best layouts it means
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.enumerate import at
from jaxpar.plan.rules.decisions import RULES, Layouts, Rule, Situation, situated
from jaxpar.plan.search import Plan, Question, Ranked, describe, weigh
from jaxpar.units import show_bytes, show_seconds


@dataclass(frozen=True, kw_only=True)
class Option:
    """A kind of layout that the rule names.

    Attributes:
      layouts: The kind.
      best: The fastest of its layouts that fit; None where none does.
      why: Why none does, in that case.
    """

    layouts: Layouts
    best: Ranked | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice of the table, beside a plan.

    Attributes:
      plan: What the cost model says.
      situation: The model and its machines as the table sees them.
      rule: Its row for that.
      options: What the row means, in its order.
    """

    plan: Plan
    situation: Situation
    rule: Rule
    options: tuple[Option, ...]

    @property
    def recommended(self) -> Ranked | None:
        """The fastest layout that the rule names; None where none of them fits."""
        fitting = [option.best for option in self.options if option.best is not None]
        return min(fitting, key=lambda each: each.time.total, default=None)

    @property
    def gap(self) -> float:
        """The share by which it is slower than the cost model's first; below 0 within the margin of a search."""
        return self.recommended.time.total / self.plan.best[0].time.total - 1 if self.recommended else np.inf

    @property
    def agrees(self) -> bool:
        """Whether the table names the cost model's first, or what is as fast within the margin of the search."""
        return self.gap <= self.plan.question.margin

    @property
    def verdict(self) -> str:
        """The difference between the two, by how much, and why."""
        first, own = self.plan.best[0], self.recommended
        best = f"{describe(first.candidate)}, {show_seconds(first.time.total)}"
        if own is None:
            return f"they differ: nothing that the table names fits; the cost model's first does: {best}"
        if _mesh(own) == _mesh(first):
            return f"they agree: the cost model's first is {best}"
        least = 0.002 * first.time.total
        causes = [f", {cause} +{show_seconds(more)}" for cause, more in own.slower(first) if more > least]
        return (
            f"{'they are as good' if self.agrees else 'they differ'}: the cost model's first is {best}; "
            f"the table's best takes {round(self.gap, 3) + 0.0:+.1%}{''.join(causes[:3])}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        situation = {key: getattr(self.situation, key) for key in ("nodes", "model", "links", "facts")}
        options = [
            {"name": each.layouts.name, "best": each.best and each.best.to_dict(), "why": each.why}
            for each in self.options
        ]
        return {
            "situation": situation,
            "rule": self.rule.advice,
            "options": options,
            "recommended": self.recommended and self.recommended.to_dict(),
            "first": self.plan.best[0].to_dict(),
            "gap": self.gap if self.recommended else None,
            "agrees": self.agrees,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        lines = [f"The published decision table: {self.rule.advice}", *(f"  {fact}" for fact in self.situation.facts)]
        width = max(len(each.layouts.name) for each in self.options)
        for each in self.options:
            said = each.why
            if each.best is not None:
                said = f"{describe(each.best.candidate)}: {show_seconds(each.best.time.total)}"
                said += f", {show_bytes(each.best.memory.total)}"
            lines.append(f"  {each.layouts.name:<{width}}  {said}")
        return "\n".join([*lines, f"  {self.verdict}"])


def advise(plan: Plan) -> Advice:
    """Returns what the published decision table says about the question of a plan.

    What it leaves open, sizes and schedule and remat, the cost model chooses. All numbers are modelled.

    Args:
      plan: The answer of `search`, which has the model and the hardware.
    """
    situation = situation_of(plan.question)
    rule = next(rule for rule in RULES if rule.fires(situation))
    options = tuple(_options(plan.question, rule))
    return Advice(plan=plan, situation=situation, rule=rule, options=options)


def situation_of(asked: Question) -> Situation:
    """Returns what the table asks about a question.

    A model fits where its state does and what one row keeps, with whatever is best computed again: the page has single
    devices do all they can before others come in.
    """
    per_node = min(asked.hardware.per_node, asked.devices)
    remat = np.array(asked.choices.remats)
    needs = {
        what: float(np.min(asked.bytes(Candidate(fsdp=n, zero=3 * (n > 1), remat=remat)).total))
        for what, n in (("device", 1), ("node", per_node))
    }
    needs["layer"] = asked.model.largest(asked.software)
    nodes = -(-asked.devices // asked.hardware.per_node)
    link = asked.hardware.between if nodes > 1 else asked.hardware.inside
    return situated(nodes=nodes, needs=needs, room=asked.limit(Candidate()), bandwidth=link.bandwidth)


def _options(asked: Question, rule: Rule) -> Iterator[Option]:
    candidates = asked.legal()
    needed, seconds = asked.bytes(candidates).total, asked.seconds(candidates).total
    for layouts in rule.layouts:
        named = layouts.among(candidates, asked.hardware.per_node)
        fits = named & (needed <= asked.limit(candidates))
        if fits.any():
            fastest = at(candidates, int(np.argmin(np.where(fits, seconds, np.inf))))
            yield Option(layouts=layouts, best=weigh(asked, fastest))
        elif named.any():
            i = int(np.argmin(np.where(named, needed, np.inf)))
            lacks = f"the leanest, {describe(at(candidates, i))}, needs {show_bytes(float(needed[i]))}"
            yield Option(layouts=layouts, best=None, why=f"does not fit: {lacks}")
        else:
            yield Option(layouts=layouts, best=None, why="is not possible with these devices, heads, layers and rows")


def _mesh(ranked: Ranked) -> tuple:
    return (*ranked.candidate.sizes.values(), ranked.candidate.zero)
