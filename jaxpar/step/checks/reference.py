"""Checks that a reference is frozen."""

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout


def check_reference(layout: Layout) -> None:
    """Refuses an optimizer that trains the reference of a model.

    Raises:
      JaxparError: If it reads a gradient of the reference.
    """
    blueprint = layout.blueprint
    if copies := sorted(blueprint.copies.keys() - layout.frozen):
        raise refuse(
            f"the optimizer trains {copies[0]}, a copy of the reference",
            rule="a reference stays as it was: it has no gradient and no optimizer state",
            fix='jp.freeze(optimizer, ["reference"])',
        )
    if shared := sorted(blueprint.shared - layout.frozen):
        raise refuse(
            f"the optimizer trains {shared[0]}, which the model shares with its reference",
            rule="what a model shares with its reference is frozen",
            fix='jp.freeze(optimizer, ["*"], but=["adapters"]) for adapters; or jp.add_reference(model, trained=[...]) '
            "with all that the optimizer trains",
        )
