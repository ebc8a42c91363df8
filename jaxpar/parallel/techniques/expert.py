"""Expert parallelism: the devices of `expert` see other examples and hold other experts (GShard, arXiv:2006.16668).

The axis splits the batch, and shards all parameters outside of experts as `fsdp` does. `expert_slots` moves tokens.
"""

from collections.abc import Set
from typing import Any

from jaxpar.errors import Problem
from jaxpar.models.dim_names import spec_axes
from jaxpar.models.islands import MIXTURE
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Technique
from jaxpar.parallel.techniques.context import check_picks

AXIS = "expert"


def capacity(*arguments: Any) -> Any:
    """Runs `expert_slots.mixture`, which a step without a mixture does not load."""
    from jaxpar.parallel.techniques.expert_slots import mixture

    return mixture(*arguments)


def problems(parallel: Parallel) -> list[Problem]:
    """Returns the problems of `expert` with other settings."""
    size = parallel.expert
    if size != 1 and parallel.exchange.per_replica:
        return [
            Problem(
                f"expert={size} with exchange {parallel.exchange}",
                "experts are exchanged where replicas step together",
                "expert=1, or leave the exchange out",
            )
        ]
    return []


def idle(layout: Layout) -> list[Problem]:
    """Returns a problem if no parameter has a dim of experts."""
    size = layout.sizes.get(AXIS, 1)
    named = any(
        AXIS in spec_axes(layout.names.get(name or "")) for place in layout.placements.values() for name in place.names
    )
    if size == 1 or named:
        return []
    shapes = [place.leaf.shape for place in layout.placements.values()]
    if any(len(shape) > 2 and shape[0] % size == 0 for shape in shapes):
        other = "the name for the dim, as paths={'experts/up': ('expert', 'embed', 'mlp')}"
        if layout.blueprint.program is None:
            other += "; or jp.from_nnx(model, example inputs), which finds experts by the use of their arrays"
    else:
        other = "one array [experts, ...] for each matrix of the experts, dim 0 named expert, in place of separate ones"
    return [
        Problem(
            f"expert={size}, but {layout.blueprint.name} has no experts",
            "the devices of `expert` hold different experts: dim 0, named expert, of the parameters of jp.mixture",
            f"expert=1 and fsdp={size}; or {other}",
        )
    ]


def island_fix(layout: Layout, islands: Set[str]) -> str:
    """Returns the island for a model that moves tokens to its experts by itself."""
    calls = layout.sizes.get(AXIS, 1) == 1 or "mixture" in islands
    return "" if calls else MIXTURE


EXPERT = Technique(
    axis=AXIS,
    problems=problems,
    idle=idle,
    how={"capacity": {"mixture": capacity}},
    island_fix=island_fix,
    check=lambda layout, _, lowered: check_picks(layout, lowered),
)
