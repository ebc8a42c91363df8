"""The settings of a named learning-rate schedule, instead of `Optimizer.decay`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxpar.errors import refuse


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """A learning-rate schedule after the warm-up, instead of `decay`.

    Attributes:
      name: A schedule of optax, such as exponential_decay or cosine_onecycle_schedule, or "package.module:function" of
        learning_rate, and optionally of steps: those of the run after the warm-up. "" means decay.
        reduce_on_plateau is optax.contrib's, which scales the updates by the losses of the steps, from the first one.
        schedule = "..." is short for it.
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
