"""The speed of a layout, in the numbers that people compare, and what would help where it is hopeless.

    throughput   examples of a step x tokens of an example / seconds
    MFU          FLOP of the model, nothing computed twice, all of attention / (seconds x devices x bfloat16 peak)
    bubble       share of the step in which stages wait for others
    cost         devices x seconds: GPU-hours of a billion tokens, and of all steps; times a price, where one is given

Below 10 % MFU, or with more bubble than work, a layout is called hopeless: a judgement, far from what runs report.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.plan.search import Question, Ranked, first_of
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.units import show_count

LOW, WAITING = 0.1, 0.5  # MFU below which, and bubble above which, a layout is hopeless
FACTORS = (2, 4, 8, 16)  # times as many rows, or as few devices: tried until it is hopeless no longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The speed of a layout; modelled.

    Attributes:
      rate: Tokens, or examples of a model that has none, a second on all devices.
      unit: Which.
      mfu: Share of the devices' bfloat16 peak that the model's own FLOP reach.
      bubble: Share of the step in which stages of a pipeline wait; None without a pipeline.
      hours: GPU-hours of a billion tokens, or of a million examples.
    """

    rate: float
    unit: str
    mfu: float
    bubble: float | None
    hours: float

    @property
    def hopeless(self) -> bool:
        """Whether nobody should pay for it."""
        return self.mfu < LOW or (self.bubble or 0.0) > WAITING

    @property
    def cells(self) -> tuple[str, str, str]:
        """Throughput, MFU and bubble as a table shows them."""
        return show_count(self.rate), f"{self.mfu:.1%}", "" if self.bubble is None else f"{self.bubble:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        return f"MFU {self.mfu:.1%}" + ("" if self.bubble is None else f", {self.bubble:.0%} of the step is bubble")


def speed(question: Question, ranked: Ranked) -> Speed:
    """Returns how fast a layout of a question is."""
    seconds, (unit, each) = ranked.time.total, question.model.unit
    peak = question.devices * question.hardware.chip.bf16_flops
    return Speed(
        rate=question.rows * each / seconds,
        unit=unit,
        mfu=question.model.step_flop(question.rows) / (seconds * peak),
        bubble=ranked.time.bubble / seconds if ranked.candidate.pipe > 1 else None,
        hours=question.devices * seconds / 3600 / (question.rows * each) * many(unit)[0],
    )


def mfu_without_mask(question: Question, ranked: Ranked) -> float:
    """Returns the MFU of a layout without attention that a causal mask drops; 0 where none is dropped.

    Half of the square of scores. `Speed.mfu` counts all of it, as PaLM (arXiv:2204.02311, appendix B) does.
    """
    masked = question.model.masked_flop(question.rows)
    whole = question.model.step_flop(question.rows)
    return speed(question, ranked).mfu * (1 - masked / whole) if masked else 0.0


def many(unit: str) -> tuple[float, str]:
    """Returns of how many the cost is told, and in words."""
    return (1e9, "a billion tokens") if unit == "tokens" else (1e6, f"a million {unit}")


def cost(question: Question, ranked: Ranked) -> str:
    """Returns what a layout costs, in words: GPU-hours, and money where the question has a price."""
    hours = {many(question.model.unit[0])[1]: speed(question, ranked).hours}
    if question.steps:
        hours[f"the job's {question.steps:,} steps"] = question.devices * ranked.time.total * question.steps / 3600
    money = lambda each: f" ({each * question.price:,.4g} at {question.price:g} an hour)" * (question.price > 0)  # noqa: E731
    return "; ".join(f"{each:,.4g} GPU-hours for {what}{money(each)}" for what, each in hours.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way out of a hopeless first choice.

    Attributes:
      what: What to change, as on the command line.
      first: What would then be first.
      speed: And how fast that is.
    """

    what: str
    first: Ranked
    speed: Speed


def ways_out(question: Question, ranked: Ranked) -> Iterator[Way]:
    """Yields what would make the first choice of a question better: more rows, fewer devices, wider axes.

    Of each kind the smallest change after which the first choice is hopeless no longer; where there is none, the best,
    if it is better by a tenth.
    """
    rows, devices = question.rows, question.devices
    bounds = {axis: most for axis in TECHNIQUES if (most := question.choices.most(axis))}
    kinds = (
        [(f"train.global_batch={rows * n}", replace(question, rows=rows * n)) for n in FACTORS],
        [(f"--devices {devices // n}", replace(question, devices=devices // n)) for n in FACTORS if devices % n == 0],
        *([(f"parallel.{axis} above {most}", _wider(question, axis))] for axis, most in bounds.items()),
    )
    before = speed(question, ranked).mfu
    for tries in kinds:
        found = list(_until_good(tries))
        best = max(found, key=lambda way: (not way.speed.hopeless, way.speed.mfu), default=None)
        if best is not None and best.speed.mfu > 1.1 * before:
            yield best


def _wider(question: Question, axis: str) -> Question:
    """Returns the question with no bound on an axis."""
    return replace(question, choices=question.choices.without_bound(axis))


def _until_good(tries: list[tuple[str, Question]]) -> Iterator[Way]:
    for what, asked in tries:
        try:
            found = first_of(asked)
        except JaxparError:  # no legal layout, or none that fits: no way out
            continue
        yield (way := Way(what=what, first=found, speed=speed(asked, found)))
        if not way.speed.hopeless:
            return
