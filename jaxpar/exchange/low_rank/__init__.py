"""Gradients sent as products of two thin matrices: replicas stay equal.

    base      the base class: selects parameters, adds error feedback, enters shard_map
    matrices  reshapes gradients to matrices
    powersgd  the dominant columns and rows of the mean, by a step of the power method
    factors   one column and row per example of a replica, which determine a dense layer's gradient

To add one: a file with a frozen dataclass that is a `LowRank`, with `low_rank_mean` and `payloads`, and a row of
`exchange.table`.
"""
