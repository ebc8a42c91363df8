"""PipeDream's partitioner: a profile of layers and a topology become stages with replicas, by a stated objective.

Nouns: a `Profile`, a chain with what crosses each cut, a `Topology` of devices, an `Objective`, and the report with
what limits the plan. To add an objective: a row of `objective.COEFFICIENTS`, and its
name in the help of `cli/partition.py`; the dynamic program minimises any of them.
"""
