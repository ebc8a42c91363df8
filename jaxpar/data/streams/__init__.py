"""The user's own data: map-style datasets, streams with saved state, and held-out examples.

    a sequence, a map-style dataset, grain.MapDataset    ─► indexed    each process reads only its rows
    grain.IterDataset, a DataLoader, any iterable        ─► stateful   shards per process, state saved while reading
    evaluation() of either, or data.evaluation           ─► evaluated
    data.sets, of any kind of source                     ─► sets

To add a kind: a class that implements `spec.Source`, and its line in `streams.user_data.open_user_data`.
"""
