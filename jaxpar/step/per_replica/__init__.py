"""Replicas that compute separately, each on its own rows of the batch.

    replicas           separate steps, until an exchange synchronizes the replicas, whose predictions may be averaged
    streaming_rounds   several such steps as one program, overlapped with a transfer
    member_steps       population members: each sees the whole batch, with its own settings
    part_norms         gradient norms of parts of a batch

To add one: write a function of one replica (`replicas.layout_of_replica` is its layout), and `vmap` it over `data`.
"""
