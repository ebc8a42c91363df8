"""Simulates stale gradients on a virtual clock: the numerics are exact, the times are modelled.

    base      seconds that a worker computes: constant, drawn from a distribution, or read from a trace; dataclasses of
              a gradient, the version of the parameters it read, and the update that applied it
    methods   workers that read at any time, or are at most some steps ahead of the slowest; backup workers; and the
              methods that `jaxpar exchange compare` accepts, by name
    parameter_servers  in several shards, each with its own versions (DistBelief), or in two levels: groups of workers
              have servers, and these have a root; or a center, with which workers that have their own parameters
              synchronize one by one

A method computes a table of updates from the workers' times, without a model. `train.virtual_clock` trains a model by
this table (by `run_elastic` if workers have their own parameters).

Terms: a worker, a share (the examples of one gradient), a version (the number of updates so far), a push (one
gradient), an update (the mean of some pushes), staleness (updates between a gradient's read and its own update).

To add a method: a frozen dataclass that is a `SimulatedRun`, and a row of `methods.SIMULATED`.
"""
