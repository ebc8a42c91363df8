"""Throughput, MFU, bubble and cost of a layout, and changes that would help a hopeless one.

    throughput   examples of a step x tokens of an example / seconds
    MFU          FLOP of the model, without recomputation, with all of attention / (seconds x devices x bfloat16 peak)
    bubble       share of the step in which stages wait for others
    cost         devices x seconds: GPU-hours per billion tokens, and of all steps; times the price, if there is one

Below 10 % MFU, or with more bubble than work, a layout is called hopeless: a judgement, far below published runs.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.plan.search import Question, Ranked, first_layout
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.units import show_count

LOW, WAITING = 0.1, 0.5  # MFU below which, and bubble above which, a layout is hopeless
FACTORS = (2, 4, 8, 16)  # multiplies examples or divides devices, in order, until the layout is no longer hopeless


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The speed of a layout; modelled.

    Attributes:
      rate: Tokens per second on all devices; examples per second if the model has no tokens.
      unit: "tokens" or "examples".
      mfu: Share of the devices' bfloat16 peak that the model's FLOP reach.
      bubble: Share of the step in which pipeline stages wait; None without a pipeline.
      hours: GPU-hours per billion tokens, or per million examples.
    """

    rate: float
    unit: str
    mfu: float
    bubble: float | None
    hours: float

    @property
    def hopeless(self) -> bool:
        """Whether MFU is below `LOW` or the bubble above `WAITING`."""
        return self.mfu < LOW or (self.bubble or 0.0) > WAITING

    @property
    def cells(self) -> tuple[str, str, str]:
        """Throughput, MFU and bubble as cells of a table."""
        return show_count(self.rate), f"{self.mfu:.1%}", "" if self.bubble is None else f"{self.bubble:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"MFU {self.mfu:.1%}" + ("" if self.bubble is None else f", {self.bubble:.0%} of the step is bubble")


def speed(question: Question, ranked: Ranked) -> Speed:
    """Returns throughput, MFU, bubble and GPU-hours of a layout."""
    seconds, (unit, per_example) = ranked.time.total, question.model.unit
    peak = question.devices * question.hardware.chip.bf16_flops
    return Speed(
        rate=question.rows * per_example / seconds,
        unit=unit,
        mfu=question.model.step_flop(question.rows) / (seconds * peak),
        bubble=ranked.time.bubble / seconds if ranked.candidate.pipe > 1 else None,
        hours=question.devices * seconds / 3600 / (question.rows * per_example) * cost_unit(unit)[0],
    )


def mfu_without_mask(question: Question, ranked: Ranked) -> float:
    """Returns the MFU of a layout without the scores that a causal mask drops; 0 if the mask drops none.

    The mask drops half of the scores. `Speed.mfu` counts all, as PaLM (arXiv:2204.02311, appendix B) does.
    """
    masked = question.model.masked_flop(question.rows)
    unmasked = question.model.step_flop(question.rows)
    return speed(question, ranked).mfu * (1 - masked / unmasked) if masked else 0.0


def cost_unit(unit: str) -> tuple[float, str]:
    """Returns the number of tokens or examples that a cost is stated for, and its name."""
    return (1e9, "a billion tokens") if unit == "tokens" else (1e6, f"a million {unit}")


def cost(question: Question, ranked: Ranked) -> str:
    """Returns the cost of a layout as text: GPU-hours, and money if the question has a price."""
    hours = {cost_unit(question.model.unit[0])[1]: speed(question, ranked).hours}
    if question.steps:
        hours[f"the job's {question.steps:,} steps"] = question.devices * ranked.time.total * question.steps / 3600
    money = lambda amount: f" ({amount * question.price:,.4g} at {question.price:g} an hour)" * (question.price > 0)  # noqa: E731
    return "; ".join(f"{amount:,.4g} GPU-hours for {scope}{money(amount)}" for scope, amount in hours.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Improvement:
    """A change that makes the first layout faster.

    Attributes:
      option: The change, as on the command line.
      first: The first layout after the change.
      speed: Speed of that layout.
    """

    option: str
    first: Ranked
    speed: Speed


def improvements(question: Question, ranked: Ranked) -> Iterator[Improvement]:
    """Yields changes that raise the MFU of the first layout by a tenth or more: more rows, fewer devices, wider axes.

    Of each kind, the smallest change after which the first layout is no longer hopeless; without one, the best change.
    """
    rows, devices = question.rows, question.devices
    bounds = {axis: bound for axis in TECHNIQUES if (bound := question.choices.largest_size(axis))}
    kinds = (
        [(f"train.global_batch={rows * n}", replace(question, rows=rows * n)) for n in FACTORS],
        [(f"--devices {devices // n}", replace(question, devices=devices // n)) for n in FACTORS if devices % n == 0],
        *([(f"parallel.{axis} above {bound}", _wider(question, axis))] for axis, bound in bounds.items()),
    )
    old_mfu = speed(question, ranked).mfu
    for tries in kinds:
        changes = list(_until_good(tries))
        best = max(changes, key=lambda way: (not way.speed.hopeless, way.speed.mfu), default=None)
        if best is not None and best.speed.mfu > 1.1 * old_mfu:
            yield best


def _wider(question: Question, axis: str) -> Question:
    return replace(question, choices=question.choices.without_bound(axis))


def _until_good(tries: list[tuple[str, Question]]) -> Iterator[Improvement]:
    for change, variant in tries:
        try:
            first = first_layout(variant)
        except JaxparError:  # no legal layout, or none that fits
            continue
        yield (way := Improvement(option=change, first=first, speed=speed(variant, first)))
        if not way.speed.hopeless:
            return
