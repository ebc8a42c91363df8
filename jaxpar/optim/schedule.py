"""The settings of a learning rate's schedule that is named, and not one of `Optimizer.decay`."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxpar.errors import refuse


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the learning rate goes on after the warm-up, where `decay` does not say it.

    Attributes:
      name: A schedule of optax, such as exponential_decay or cosine_onecycle_schedule, or "package.module:function" of
        learning_rate, and of steps if it takes them: those of the run after the warm-up. "" is decay.
        reduce_on_plateau is optax.contrib's, which scales the updates by the losses of the steps, from the first one.
        schedule = "..." for short.
      arguments: Its other arguments, as optax has them; learning_rate is its peak_value, init_value or value.
        They hold as they are, whatever reference_batch.
    """

    SHORT: ClassVar[str] = "name"  # the key that a text in place of a job's table stands for

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.arguments and not self.name:
            raise refuse(
                f"optimizer.schedule.arguments = {self.arguments!r:.200} without a name",
                rule="arguments are those of a schedule that has a name",
                fix='name = "exponential_decay"',
            )
