"""Data parallelism: replicas of the parameters train on different examples and synchronize by an exchange."""

from jaxpar.errors import Problem
from jaxpar.exchange.base import AllReduce, Exchange
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout, trained_shards
from jaxpar.parallel.techniques.base import Technique

GATHER = "gather"  # the form of context parallelism in which XLA, not a shard_map, moves keys and values


def problems(parallel: Parallel) -> list[Problem]:
    """Returns the problems of `exchange`."""
    exchange = parallel.exchange
    if not isinstance(exchange, Exchange):
        return [
            Problem(
                f"exchange={exchange!r:.60}",
                "exchange is an Exchange, such as those of jaxpar.exchange.table",
                "leave it out: gradients are summed in every step",
            )
        ]
    several = parallel.data != 1 or exchange.count(1) > 1
    errors = exchange.problems(parallel.data) if type(parallel.data) is int and parallel.data > 0 and several else []
    if exchange != AllReduce() and not several:
        errors.append(
            Problem(
                f"exchange {exchange} with data=1 does nothing",
                "an exchange is between the replicas over `data`",
                "data=2 or more, or leave the exchange out",
            )
        )
    if exchange.per_replica and parallel.pipe != 1:
        errors.append(
            Problem(
                f"exchange {exchange} with pipe={parallel.pipe}",
                "replicas step apart only where each device runs all layers: a pipeline sums their gradients itself",
                "pipe=1 and a larger fsdp or tensor, or leave the exchange out",
            )
        )
    if exchange.per_replica and parallel.context != 1 and parallel.context_by != GATHER:
        errors.append(
            Problem(
                f"exchange {exchange} with context_by={parallel.context_by!r}",
                "replicas that step apart are mapped over `data`, inside of which no piece of a sequence can travel",
                f"context_by={GATHER!r}, or leave the exchange out",
            )
        )
    return errors


def split_problems(layout: Layout) -> list[Problem]:
    """Returns problems: parameters that a rule splits over `data` although replicas differ, and unused exchanges."""
    if not layout.parallel.exchange.per_replica:
        return []
    exchange = layout.parallel.exchange
    return (exchange.idle(trained_shards(layout), layout.sizes["data"]) if layout.sizes["data"] > 1 else []) + [
        Problem(
            f"{path} {layout.describe(path)} with exchange {layout.parallel.exchange}",
            "each replica has all of its parameters, where replicas step apart",
            "rules that leave `data` out",
        )
        for path, place in layout.placements.items()
        if any("data" in ((entry,) if isinstance(entry, str) else entry or ()) for entry in place.sharded)
    ]


DATA = Technique(axis="data", problems=problems, idle=split_problems)
