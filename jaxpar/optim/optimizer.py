"""The optimizer settings of a job, from which `optax_chain` builds an optax chain, and the growth of its batch.

A batch may grow in phases, instead of a learning rate that decreases:

    step      0  1  2   3        4        5 6 7 8     grow = [[3, 2], [5, 2]]
    draws     0  1  2   3 4      5 6      7 8 9 10 ...
    batch     B  B  B   2 B      2 B      4 B

A batch of a later phase consists of several draws; each draw is a batch of the size of the first phase. So no example
is skipped or repeated, and data sources do not depend on the phase. A step runs more microbatches of the same size: it
needs no more memory, and each phase compiles one more program.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from jaxpar.errors import check_ranges, refuse

SWEPT = ("learning_rate", "final", "weight_decay", "beta1", "beta2", "clip")  # settings that may be arrays
# argument of an optimizer to the setting that provides it; optimizers not listed get only their `arguments`
SETTINGS: dict[str, dict[str, str]] = {
    "adamw": {"b1": "beta1", "b2": "beta2", "weight_decay": "weight_decay"},
    "adam": {"b1": "beta1", "b2": "beta2"},
    "sgd": {"momentum": "beta1"},
    "lion": {"b1": "beta1", "b2": "beta2", "weight_decay": "weight_decay"},
    "lamb": {"b1": "beta1", "b2": "beta2", "weight_decay": "weight_decay"},
    "lars": {"momentum": "beta1", "weight_decay": "weight_decay"},
    "adafactor": {"weight_decay_rate": "weight_decay"},
    "muon": {"weight_decay": "weight_decay"},
}


@dataclass(frozen=True)
class Growth:
    """Phases of a growing batch.

    Attributes:
      phases: Pairs (step, factor), in order of steps: after `step` steps the batch becomes `factor` times larger.

    Source: Smith, Kindermans, Ying, Le (2018), arXiv:1711.00489: dividing the rate by a factor, or multiplying the
    batch by it, gives updates the same temperature; see `noise`.
    """

    phases: tuple[tuple[int, int], ...] = ()

    @property
    def factors(self) -> tuple[int, ...]:
        """Number of draws per step, for each phase; 1 for the first phase."""
        result = [1]
        for _, factor in self.phases:
            result.append(result[-1] * factor)
        return tuple(result)

    def factor(self, step: int) -> int:
        """Number of draws in a step, which is counted from 0."""
        return self.factors[sum(begin <= step for begin, _ in self.phases)]

    def total_draws(self, steps: int) -> int:
        """Total number of draws in the first `steps` steps."""
        begins = [0, *(begin for begin, _ in self.phases)]
        ends = [*begins[1:], steps]
        return sum(
            factor * max(0, min(end, steps) - begin)
            for factor, begin, end in zip(self.factors, begins, ends, strict=True)
        )

    def draws(self, step: int) -> range:
        """Range of the numbers of the draws in a step; steps are counted from 0."""
        return range(self.total_draws(step), self.total_draws(step + 1))

    def describe(self, batch: int) -> str:
        """Describes the phases for a batch size; "" if it does not grow."""
        if not self.phases:
            return ""
        phases_and_factors = zip(self.phases, self.factors[1:], strict=True)
        later = ", ".join(f"{batch * factor} after {begin}" for (begin, _), factor in phases_and_factors)
        return f"{batch} examples per step, {later} steps: {len(set(self.factors))} programs"


def check_phases(phases: Sequence[tuple[int, float]], key: str, steps: int = 2**31) -> None:
    """Refuses phases that are not in order or have no effect.

    Args:
      phases: (step, factor) pairs.
      key: Name of the setting, for messages.
      steps: Number of steps in the run.

    Raises:
      JaxparError: If a phase is invalid; the message names the first.
    """
    before = 0
    for begin, factor in phases:
        got = f"{key} = {[list(phase) for phase in phases]}"
        if not before < begin < steps:
            raise refuse(
                f"{got}: a phase begins after {begin} steps",
                rule=f"phases begin one after the other, here after step {before}, and before the run ends",
                fix=f"[{min(before + 1, steps - 1)}, {factor}]",
            )
        if not 1 < factor < 2**31:
            raise refuse(f"{got}: a factor of {factor}", rule="each phase has a factor above 1", fix=f"[{begin}, 2]")
        before = begin


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """A learning-rate schedule after the warm-up, instead of `decay`.

    Attributes:
      name: A schedule of optax, such as exponential_decay or cosine_onecycle_schedule, or "package.module:function" of
        learning_rate, and optionally of steps: those of the run after the warm-up. "" means decay.
        reduce_on_plateau is optax.contrib's, which scales the updates by the losses of the steps, from the first one.
        schedule = "NAME" is short for a table with only a name.
      arguments: Its other arguments, as in optax; learning_rate becomes its peak_value, init_value or value.
        reference_batch does not scale them.
    """

    SHORT: ClassVar[str] = "name"  # the key that a plain text in place of the table sets

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.arguments and not self.name:
            raise refuse(
                f"optimizer.schedule.arguments = {self.arguments!r:.200} without a name",
                rule="arguments are those of a schedule that has a name",
                fix='name = "exponential_decay"',
            )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer and its settings.

    Attributes:
      name: adamw, adam, sgd, lion, lamb, lars, adafactor, muon, or any other optimizer of optax or optax.contrib that
        takes a learning rate, such as adagrad; or "package.module:function" of learning_rate (a schedule) that
        returns an optax chain. For muon, `jaxpar.optim.muon` decides which parameters are matrices, by their dim
        names. Optimizers that take norms of a parameter, such as lamb, take them per layer of a stack: see
        `jaxpar.optim.wrappers.per_layer`, which your own function may use too. lars has no trust ratio for biases and
        norms.
      arguments: Further arguments, as in optax: { eps = 1e-6 }. weight_decay, beta1 and beta2 belong to the eight
        optimizers named first; others take all their arguments here.
      learning_rate: The highest learning rate.
      warmup: Steps over which the learning rate rises from 0 to the highest, as in optax: the first step has rate 0
        and changes no parameter, and the first step after the warm-up has the highest rate.
      decay: Decay of the rate after the warm-up: constant, cosine or linear.
      final: Share of the highest learning rate that the decay reaches after the last step, as in optax; the last
        step itself still has the rate before: with linear decay, (1 - final) / (steps - warmup) of the highest more.
      drops: [[step, factor], ...]: after so many steps the rate is divided by the factor, in addition to its decay.
        A drop reduces the noise of updates as much as a batch that grows by the factor (train.grow), in more steps.
      weight_decay: Weight decay of matrices; vectors (biases, norms) are not decayed, stacked or not.
      beta1: Decay of the mean of gradients; the momentum of sgd and lars.
      beta2: Decay of the mean of squares.
      clip: Largest global norm of the gradients; 0 does not clip.
      reference_batch: Examples per step for which learning_rate, warmup and drops were tuned: with another global
        batch the rate follows `scaling`, and warm-up and drops come after as many examples. 0 uses them as they are.
        A batch that grows by train.grow keeps the rate of its first phase.
      scaling: How the rate follows the global batch, given reference_batch: linear (Goyal et al. 2017), or sqrt (You
        et al. 2019, with lamb).
      schedule: Schedule after the warm-up, instead of decay and final.
    """

    name: str = "adamw"
    arguments: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3
    warmup: int = 0
    decay: Literal["constant", "cosine", "linear"] = "cosine"
    final: float = 0.1
    drops: tuple[tuple[int, float], ...] = ()
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    reference_batch: int = 0
    scaling: Literal["linear", "sqrt"] = "linear"
    schedule: RateSchedule = field(default_factory=RateSchedule)

    def __post_init__(self):
        float_max = 3.4e38  # float32
        check_ranges(
            self,
            "optimizer",
            {
                "learning_rate": (0, float_max),
                "warmup": (0, 2**31 - 1),
                "final": (0, 1),
                "weight_decay": (0, float_max),
                "clip": (0, float_max),
                "beta1": (0, 1),
                "beta2": (0, 1),
                "reference_batch": (0, 2**31 - 1),
            },
            below=("beta1", "beta2"),
        )
        check_phases(self.drops, "optimizer.drops")
        if self.weight_decay and self.name in ("adam", "sgd"):
            raise refuse(
                f"optimizer.weight_decay = {self.weight_decay} with {self.name}",
                rule=f"{self.name} does not decay weights",
                fix='name = "adamw", or leave weight_decay out',
            )
        self._check_named()

    def _check_named(self) -> None:
        """Refuses settings that have no effect with this optimizer or schedule."""
        fields = type(self).__dataclass_fields__
        changed = lambda names: [name for name in names if getattr(self, name) != fields[name].default]  # noqa: E731
        if self.name not in SETTINGS and (wrong := changed(("weight_decay", "beta1", "beta2"))):
            raise refuse(
                f"optimizer.{wrong[0]} = {getattr(self, wrong[0])} with {self.name}",
                rule=f"{', '.join(SETTINGS)} have weight_decay, beta1 and beta2; others have their own arguments",
                fix="[optimizer.arguments]",
            )
        if self.schedule.name and (wrong := changed(("decay", "final"))):
            raise refuse(
                f"optimizer.{wrong[0]} = {getattr(self, wrong[0])} with optimizer.schedule = {self.schedule.name}",
                rule="the rate follows either decay and final, or a schedule with its own arguments",
                fix="leave one of the two out",
            )

    @property
    def is_plain(self) -> bool:
        """Whether these are only jaxpar's own settings, so that no chain has to be built in order to check them."""
        return self.name in SETTINGS and not self.arguments and not self.schedule.name

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate is one number."""
        return not (self.schedule.name or self.warmup or self.drops) and self.decay == "constant"

    @property
    def momentum(self) -> float:
        """Share of the previous update that is added to the next one; 0 for optimizers that average gradients."""
        return self.beta1 if self.name in ("sgd", "lars") else 0.0

    def for_batch(self, batch: int) -> "Optimizer":
        """The settings scaled to a global batch.

        Args:
          batch: Examples per step, over all devices and microbatches, however a mesh divides them.
        """
        if not self.reference_batch:
            return self
        ratio = batch / self.reference_batch
        rate = self.learning_rate * (ratio if self.scaling == "linear" else math.sqrt(ratio))
        steps = -(-self.warmup * self.reference_batch // batch)
        drops = tuple((-(-step * self.reference_batch // batch), factor) for step, factor in self.drops)
        return replace(self, learning_rate=rate, warmup=steps, drops=drops, reference_batch=0)

    def describe_rate(self, batch: int) -> str:
        """Describes how the rate follows the global batch; "" if it does not."""
        if not self.reference_batch:
            return ""
        scaled = self.for_batch(batch)
        warmup_text = f", reached after {scaled.warmup} steps" if scaled.warmup else ""
        return (
            f"learning rate {scaled.learning_rate:.4g} for {batch} examples per step{warmup_text}: "
            f"{self.learning_rate:.4g} for {self.reference_batch}, {self.scaling} in the batch"
        )
