"""`jp.add_reference`: a model with its frozen reference, for `jp.dpo_loss`."""

from collections.abc import Callable, Iterable

from jaxpar.parallel.compose import as_blueprint
from jaxpar.sharding.names import Blueprint
from jaxpar.sharding.reference import with_reference


def add_reference(model: Callable | Blueprint, *, trained: Iterable[str] | None = None) -> Blueprint:
    """Adds a frozen reference, the model as it is at the start; returns a model for `compose`.

    The optimizer has to freeze it: `jp.freeze(chain, ["reference"])`. A model of `jp.add_lora` is its own reference
    without the adapters, so that nothing is copied: `jp.freeze(chain, ["*"], but=["adapters"])`.

    Args:
      model: As for `compose`.
      trained: Patterns of the parameters that are trained, if not all are: the reference has copies of these, and
        shares the others, which the optimizer has to freeze too.

    Raises:
      JaxparError: If a pattern matches no parameter, or the model has BatchNorm or other state that training changes.
    """
    return with_reference(as_blueprint(model), None if trained is None else tuple(trained))
