"""ZeRO and FSDP: `fsdp` shards the training state, and sees other examples."""

from jaxpar.errors import Problem
from jaxpar.parallel.declare import ZERO_SHARDS, Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Technique, splits_nothing
from jaxpar.sharding.shard_bytes import shard_bytes
from jaxpar.units import show_bytes


def problems(parallel: Parallel) -> list[Problem]:
    """Returns what is wrong with `zero` and `replicate_above`."""
    found = []
    if parallel.zero is not None and (type(parallel.zero) is not int or not 0 <= parallel.zero <= 3):
        found.append(
            Problem(
                f"zero={parallel.zero!r}",
                "zero is 0 (nothing), 1 (optimizer state), 2 (and gradients) or 3 (and parameters)",
                "zero=3",
            )
        )
    elif parallel.zero and parallel.fsdp == 1:
        found.append(
            Problem(
                f"zero={parallel.zero} with fsdp=1 shards nothing",
                f"zero={parallel.zero} shards {ZERO_SHARDS[parallel.zero]} over the axis `fsdp`",
                "fsdp=2 or more (fsdp=-1 takes what is left), or leave zero out",
            )
        )
    if type(parallel.replicate_above) is not int or parallel.replicate_above < 0:
        found.append(
            Problem(
                f"replicate_above={parallel.replicate_above!r}",
                "replicate_above is a number of bytes",
                "replicate_above=4 * 2**20",
            )
        )
    return found


def idle(layout: Layout) -> list[Problem]:
    """Returns that nothing is sharded, or which large parameters are not."""
    nothing = splits_nothing(layout, "fsdp", "that it divides") if layout.parallel.stage else []
    return nothing + left_whole(layout)


def left_whole(layout: Layout) -> list[Problem]:
    """Returns the parameters, and other state, that should be sharded, are not, and are too big to be silent about."""
    limit = layout.parallel.replicate_above
    problems = []
    for path, place in {**layout.placements, **layout.others}.items():
        own = shard_bytes(place.leaf, place.sharded, layout.sizes)
        if layout.parallel.stage and place.used == place.sharded and own > limit:
            ways = layout.sizes["fsdp"]
            problems.append(
                Problem(
                    f"{path} of {list(place.leaf.shape)} ({show_bytes(own)}) stays whole on all {ways} devices of fsdp",
                    f"{'a parameter' if path in layout.placements else 'other state'} above {show_bytes(limit)} "
                    f"is sharded by zero={layout.parallel.stage}",
                    f"a dim that {ways} divides, another fsdp, or replicate_above = {own}",
                )
            )
    return problems


SHARDING = Technique(axis="fsdp", problems=problems, idle=idle)
