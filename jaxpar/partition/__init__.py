"""PipeDream's partitioner: splits a profile of layers into replicated stages for a topology, by a chosen objective.

Terms: a `Profile`, a `Chain` (layers in order, and the bytes that cross each cut), a `Topology` of devices, an
`Objective`, and a report that names the plan's bottleneck. To add an objective: a row of `objective.COEFFICIENTS`, and
its name in the help of `cli/partition.py`; the dynamic program minimises any objective.
"""
