"""Replicas that differ: each trains on its own examples, and all synchronize every N steps.

    local      replicas take the mean of their parameters (model averaging, local SGD)
    diloco     the mean parameter change since the last sync round is the outer optimizer's gradient (in `local`)
    streaming  diloco of one fragment of the model at a time (`fragments`)
    easgd      each replica moves towards a center, and the center towards the replicas' mean (in `local`)
    gossip     each replica takes a weighted mean of its own parameters and its neighbours'
    ensemble   replicas never synchronize: evaluation averages their predictions (in `local`)

Terms: a replica, a sync round, the anchor (the parameters after the last sync round), the graph of gossip
(which replicas are neighbours).

To add one: a file with a frozen dataclass that is an `Exchange` with `replicas_differ = True`, and a row of
`exchange.table`.
"""
