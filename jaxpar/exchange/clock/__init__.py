"""Staleness on a virtual clock: *simulated*. The numerics are exact, the time is modelled; JAX runs nothing late.

    delays    a worker's compute times: constant, drawn from a distribution, or from a trace
    events    the nouns: a gradient, the version of the parameters it read, and the update that applied it
    stale     workers that read at any time, or lead the slowest by a bounded number of steps; backup workers
    sharded   a parameter server in several shards, each with its own versions (DistBelief)
    elastic   workers with their own parameters, which meet a center one by one
    two_levels  a parameter server in two levels: workers have servers of their own, and these have a root
    barriers  the clock of real synchronous replicas: every N steps all wait for the slowest
    table     the methods that `jaxpar exchange compare` knows by name

A method and the workers' times make a table of updates, without any numbers of a model. `train.virtual_clock` trains a
model by it (`train.elastic_virtual_clock` where workers have their own parameters).

Nouns: a worker, a share (the examples of one gradient), a version (the number of updates so far), a push (one
gradient), an update (the mean of some pushes), staleness (updates between a gradient's read and its own update).

To add a method: a frozen dataclass that is a `Simulated`, and a row of `table.SIMULATED`.
"""
