"""Gradients that travel as products of two thin matrices: replicas stay equal.

    base      what they have in common: which parameters, what is lost, where it is computed
    matrices  gradients as matrices
    powersgd  the columns and rows that say most of the mean, by a step of the power method
    factors   as many columns and rows as a replica has examples: all of a dense layer's gradient

To add one: a file with a frozen dataclass that is a `LowRank`, with `agreed` and `travels`, and a row of
`exchange.table`.
"""
