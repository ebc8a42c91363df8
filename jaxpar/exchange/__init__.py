"""How replicas of a model agree, and the collectives by which they do, as tables of messages.

    base         the protocol of an exchange: what happens to gradients, to parameters every so many steps, what is sent
    between      where replicas meet: their mean, by XLA or by a table of messages
    all_reduce   the default: gradients are summed in every step
    averaging/   replicas that differ, and meet every so many steps
    population/  members that see the same examples, with other settings of their optimizer
    compressed/  gradients that travel as codes
    low_rank/    gradients that travel as products of thin matrices
    clock/       stale gradients, simulated: what is applied when, on a virtual clock
    collectives/ collectives as rounds of messages: replayed on numbers, run on devices, priced
    table        the exchanges that a job may name

Nouns: `Exchange` (a frozen value), `Replicas` where they meet, `Between` them a mesh axis, what is `Sent` (the noun
`Collective`, which the ledger has too), an algorithm (rounds of messages).

To add an exchange: a file with a frozen dataclass that is an `Exchange`, and a row of `table.EXCHANGES` (or `with
added(name, kind)`, for as long as a test or a script runs). Say whether replicas `differ` and after how many steps
they `agree`; the step, checkpoints, jobs, plans and the inspector read it from there. To add an all-reduce: see
`collectives`.
"""

from importlib import import_module

_HOMES = {
    "contraction": "averaging.graphs",
    "ring": "averaging.graphs",
    "Exponential": "clock.delays",
    "Times": "clock.delays",
    "AsynchronousEasgd": "clock.elastic",
    "mean_staleness": "clock.events",
    "Downpour": "clock.sharded",
    "Stale": "clock.stale",
    "TwoLevels": "clock.two_levels",
    "algorithms": "collectives",
    "price": "collectives",
    "programs": "collectives",
    "Link": "jaxpar.mesh.links",
}
__all__ = [*_HOMES]  # what a notebook looks at one by one  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name] if _HOMES[name].startswith("jaxpar.") else f"{__name__}.{_HOMES[name]}"
    return import_module(f"{home}.{name}") if home.endswith(".collectives") else getattr(import_module(home), name)
