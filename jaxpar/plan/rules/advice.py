"""Compares the published decision table with the cost model.

model, hardware ──► search ──► plan ──► advise: the matching row, and the best layouts that it names
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.enumeration import select_one
from jaxpar.plan.rules.decisions import RULES, LayoutKind, Rule, Situation, make_situation
from jaxpar.plan.search import Plan, Question, Ranked, describe, predict
from jaxpar.units import show_bytes, show_seconds


@dataclass(frozen=True, kw_only=True)
class AdviceOption:
    """A kind of layout that the rule names.

    Attributes:
      layouts: The kind.
      best: The fastest of its layouts that fit; None if none fits.
      why: Reason why none fits; "" otherwise.
    """

    layouts: LayoutKind
    best: Ranked | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice of the table, compared with a plan.

    Attributes:
      plan: The cost model's plan.
      situation: The model and its machines in terms of the table.
      rule: The row of the table for the situation.
      options: The kinds of layouts that the row recommends, in the table's order.
    """

    plan: Plan
    situation: Situation
    rule: Rule
    options: tuple[AdviceOption, ...]

    @property
    def recommended(self) -> Ranked | None:
        """The fastest layout that the rule names; None if none fits."""
        fitting = [option.best for option in self.options if option.best is not None]
        return min(fitting, key=lambda ranked: ranked.time.total, default=None)

    @property
    def gap(self) -> float:
        """The share by which `recommended` is slower than the plan's first; may be below 0 by up to the margin."""
        return self.recommended.time.total / self.plan.best[0].time.total - 1 if self.recommended else np.inf

    @property
    def agrees(self) -> bool:
        """Whether the table names the plan's first layout, or one as fast within the search's margin."""
        return self.gap <= self.plan.question.margin

    @property
    def verdict(self) -> str:
        """Compares the rule's layout with the cost model's, as text: the difference in step time, and its causes."""
        first, advised = self.plan.best[0], self.recommended
        best = f"{describe(first.candidate)}, {show_seconds(first.time.total)}"
        if advised is None:
            return f"they differ: nothing that the table names fits; the cost model's first does: {best}"
        if _mesh(advised) == _mesh(first):
            return f"they agree: the cost model's first is {best}"
        floor = 0.002 * first.time.total
        causes = [f", {cause} +{show_seconds(extra)}" for cause, extra in advised.slower_causes(first) if extra > floor]
        return (
            f"{'they are as good' if self.agrees else 'they differ'}: the cost model's first is {best}; "
            f"the table's best takes {round(self.gap, 3) + 0.0:+.1%}{''.join(causes[:3])}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the advice for JSON."""
        situation = {key: getattr(self.situation, key) for key in ("nodes", "model", "links", "facts")}
        options = [
            {"name": option.layouts.name, "best": option.best and option.best.to_dict(), "why": option.why}
            for option in self.options
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
        width = max(len(option.layouts.name) for option in self.options)
        for option in self.options:
            text = option.why
            if option.best is not None:
                text = f"{describe(option.best.candidate)}: {show_seconds(option.best.time.total)}"
                text += f", {show_bytes(option.best.memory.total)}"
            lines.append(f"  {option.layouts.name:<{width}}  {text}")
        return "\n".join([*lines, f"  {self.verdict}"])


def advise(plan: Plan) -> Advice:
    """Applies the published decision table to the question of a plan.

    The cost model chooses sizes, schedule and remat, which the table leaves open. All numbers are modelled.

    Args:
      plan: The result of `search`.
    """
    situation = situation_of(plan.question)
    rule = next(rule for rule in RULES if rule.fires(situation))
    options = tuple(_options(plan.question, rule))
    return Advice(plan=plan, situation=situation, rule=rule, options=options)


def situation_of(question: Question) -> Situation:
    """Returns the situation of a question in terms of the table.

    A model fits if its state and the residuals of one example fit under the remat policy that needs the least memory:
    the published page tries all options of a single device before it adds devices.
    """
    per_node = min(question.hardware.per_node, question.devices)
    remat = np.array(question.choices.remats)
    needs = {
        holder: float(np.min(question.bytes(Candidate(fsdp=n, zero=3 * (n > 1), remat=remat)).total))
        for holder, n in (("device", 1), ("node", per_node))
    }
    needs["layer"] = question.costs.largest_layer
    nodes = -(-question.devices // question.hardware.per_node)
    link = question.hardware.between if nodes > 1 else question.hardware.inside
    return make_situation(nodes=nodes, needs=needs, room=question.limit(Candidate()), bandwidth=link.bandwidth)


def _options(question: Question, rule: Rule) -> Iterator[AdviceOption]:
    candidates = question.legal()
    sizes, seconds = question.bytes(candidates).total, question.seconds(candidates).total
    for layouts in rule.layouts:
        mask = layouts.mask(candidates, question.hardware.per_node)
        fits = mask & (sizes <= question.limit(candidates))
        if fits.any():
            fastest = select_one(candidates, int(np.argmin(np.where(fits, seconds, np.inf))))
            yield AdviceOption(layouts=layouts, best=predict(question, fastest))
        elif mask.any():
            i = int(np.argmin(np.where(mask, sizes, np.inf)))
            reason = f"the leanest, {describe(select_one(candidates, i))}, needs {show_bytes(float(sizes[i]))}"
            yield AdviceOption(layouts=layouts, best=None, why=f"does not fit: {reason}")
        else:
            yield AdviceOption(
                layouts=layouts, best=None, why="is not possible with these devices, heads, layers and rows"
            )


def _mesh(ranked: Ranked) -> tuple:
    return (*ranked.candidate.sizes.values(), ranked.candidate.zero)
