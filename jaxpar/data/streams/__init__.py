"""Data of one's own: examples by number, streams that keep their state, and what is held out of them.

    a sequence, a map-style dataset, grain.MapDataset    ─► indexed    each process reads its rows alone
    grain.IterDataset, a DataLoader, any iterable        ─► stateful   shards per process, state noted as it is read
    evaluation() of either, or data.evaluation           ─► evaluated
    data.sets, of any kind of source                     ─► sets

To add a kind: a class that implements `spec.Source`, and its line in `streams.opening.open_own`.
"""
