"""PipeDream's partitioner: a profile of layers and a topology become stages with replicas, by a stated objective.

Nouns: a `Profile`, a `Chain` (layers in order, and the bytes that cross each cut), a `Topology` of devices, an
`Objective`, and a report that names the plan's bottleneck. To add an objective: a row of `objective.COEFFICIENTS`, and
its name in the help of `cli/partition.py`; the dynamic program minimises any of them.
"""
