"""Replicas that differ: each makes steps by gradients of its own examples alone, and they meet every so many steps.

    local      they take the mean of their parameters (model averaging, local SGD)
    diloco     the way that the mean has gone is a gradient for an outer optimizer
    streaming  diloco of one fragment of the model at a time (`fragments`)
    easgd      each is drawn to a center, and the center to their mean
    gossip     each takes a weighted mean of its own parameters and its neighbours' (`graphs`)
    ensemble   they never meet: evaluation averages what they predict

Nouns: a replica, a meeting, the anchor (parameters as they were after the last meeting), a graph of who hears whom.

To add one: a file with a frozen dataclass that is an `Exchange` with `differ = True`, and a row of `exchange.table`.
"""
