"""Staleness on a virtual clock: *simulated*. The numerics are exact, the time is modelled; JAX runs nothing late.

    delays    how long a worker computes: always as long, or drawn from a law, or from a trace
    events    the nouns: who computed what from which version of the parameters, and when it was applied
    stale     workers that read when they like, or lead the slowest by a bounded number of steps; backup workers
    sharded   a parameter server in several shards, each with its own versions (DistBelief)
    elastic   workers with parameters of their own, which meet a center one by one
    two_levels  a parameter server in two levels: workers have servers of their own, and these have a root
    barriers  the clock of what does run: every so many steps all wait for the slowest
    table     the methods that `jaxpar exchange compare` knows by name

A method and the times of workers make a table of updates. It has no numbers of a model in it: it is replayed, drawn and
tested as it is, and `train.on_clock` trains any model by it (`train.elastic_on_clock` where workers have parameters of
their own).

Nouns: a worker, a share (the examples of one gradient), a version (how many updates the parameters have had), a push
(one gradient), an update (the mean of some pushes), staleness (updates between what a gradient read and its own).

To add a method: a frozen dataclass that is a `Simulated`, and a row of `table.SIMULATED`.
"""
