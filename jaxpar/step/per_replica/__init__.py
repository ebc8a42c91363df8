"""Replicas that compute separately, each on its own rows of the batch.

    replicas     separate steps, until an exchange synchronizes the replicas
    replica_map, trained_state   a function mapped over replicas; what an exchange reads and writes
    rounds       several such steps as one program, overlapped with a transfer
    population   population members: each sees the whole batch, with its own settings
    ensemble     averages the replicas' predictions
    part_norms   gradient norms of parts of a batch

To add one: write a function of one replica (`replicas.layout_of_replica` is its layout), and `vmap` it over `data`.
"""
