"""Gradients sent as products of two thin matrices: replicas stay equal.

    base      what all of them share: which parameters, error feedback, shard_map
    matrices  gradients as matrices
    powersgd  the dominant columns and rows of the mean, by a step of the power method
    factors   as many columns and rows as a replica has examples: all of a dense layer's gradient

To add one: a file with a frozen dataclass that is a `LowRank`, with `agreed` and `travels`, and a row of
`exchange.table`.
"""
