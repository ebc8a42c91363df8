"""Synchronizes replicas of a model, by XLA's collectives or by tables of messages.

    base         the protocol of an exchange: functions of gradients and of parameters, and the traffic of both;
                 the default, which sums gradients in every step
    replica_mesh means over the mesh axis of the replicas, by XLA or by a table of messages
    averaging/   replicas that differ and synchronize every N steps
    population/  members that see the same examples with different optimizer settings
    compressed/  gradients sent as codes
    low_rank_gradients  gradients sent as products of thin matrices
    clock/       simulates stale gradients: a virtual clock decides when each gradient is applied
    collectives/ collectives as rounds of messages, which run on devices and have a price in seconds
    table        the exchanges that a job may name

Terms: `Exchange` (a frozen value), `Replicas` (their state at a sync round), `ReplicaMesh` (the mesh axis of the
replicas), `Traffic` (a `Collective` of the ledger and how often it runs), an algorithm (rounds of messages).

To add an exchange: a file with a frozen dataclass that is an `Exchange`, and a row of `table.EXCHANGES` (or `with
with_exchange(name, kind)` for the time of a test or a script). Set whether `replicas_differ` and how they
`synchronize`; the step, checkpoints, jobs, plans and the inspector read it from there. To add an all-reduce: see
`collectives`.
"""

from importlib import import_module

_HOMES = {
    "contraction": "averaging.gossip",
    "ring": "averaging.gossip",
    "Exponential": "clock.base",
    "WorkerTimes": "clock.base",
    "AsynchronousEasgd": "clock.parameter_servers",
    "mean_staleness": "clock.base",
    "Downpour": "clock.parameter_servers",
    "Stale": "clock.methods",
    "TwoLevels": "clock.parameter_servers",
    "algorithms": "collectives",
    "programs": "collectives",
    "Link": "jaxpar.mesh.chips",
}
__all__ = [*_HOMES]  # for notebooks  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name] if _HOMES[name].startswith("jaxpar.") else f"{__name__}.{_HOMES[name]}"
    return import_module(f"{home}.{name}") if home.endswith(".collectives") else getattr(import_module(home), name)
