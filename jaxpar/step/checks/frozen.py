"""Checks that 8-bit parameters and references are frozen."""

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import is_scales


def check_eight_bits(layout: Layout) -> None:
    """Refuses an optimizer that reads the gradients of 8-bit matrices.

    Raises:
      JaxparError: If it reads one.
    """
    eight_bit = {path for path, adapter in layout.blueprint.adapters.items() if adapter.float_dtype}
    eight_bit |= {path for path in layout.placements if is_scales(layout.blueprint, path)}
    if trained := sorted(eight_bit - layout.frozen):
        raise refuse(
            f"{trained[0]} is {layout.placements[trained[0]].leaf.dtype}, and the optimizer reads its gradient",
            rule="a base in 8 bits is frozen: it has no gradient",
            fix='jp.freeze(chain, ["*"], but=["adapters"]); or jp.add_lora(...) without base="int8", to train it too',
        )


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
