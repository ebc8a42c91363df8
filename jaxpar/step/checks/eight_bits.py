"""Checks that what is kept in 8 bits is not trained."""

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import is_scales


def check_eight_bits(layout: Layout) -> None:
    """Refuses an optimizer that reads gradients of matrices in 8 bits.

    Raises:
      JaxparError: If it does.
    """
    kept = {path for path, each in layout.blueprint.adapters.items() if each.wide}
    kept |= {path for path in layout.placements if is_scales(layout.blueprint, path)}
    if trained := sorted(kept - layout.frozen):
        raise refuse(
            f"{trained[0]} is {layout.placements[trained[0]].leaf.dtype}, and the optimizer reads its gradient",
            rule="a base in 8 bits is frozen: it has no gradient",
            fix='jp.freeze(chain, ["*"], but=["adapters"]); or jp.adapted(...) without base="int8", to train it too',
        )
