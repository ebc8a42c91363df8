"""Replicas that differ: each steps by gradients of its own examples alone, and they synchronize every N steps.

    local      they take the mean of their parameters (model averaging, local SGD)
    diloco     the mean parameter change since the last sync round is the outer optimizer's gradient
    streaming  diloco of one fragment of the model at a time (`fragments`)
    easgd      each is drawn to a center, and the center to their mean
    gossip     each takes a weighted mean of its own parameters and its neighbours' (`graphs`)
    ensemble   they never synchronize: evaluation averages their predictions

Nouns: a replica, a sync round, the anchor (the parameters after the last sync round), a graph of which replica hears
which.

To add one: a file with a frozen dataclass that is an `Exchange` with `differ = True`, and a row of `exchange.table`.
"""
