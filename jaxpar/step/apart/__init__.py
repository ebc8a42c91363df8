"""What replicas compute each for itself, from rows of the batch that are its own.

    replicas     steps that they make apart, until an exchange lets them agree
    rounds       several such steps as one program, in which what is sent is on its way
    members      those of a population: each sees all of the batch, and has settings of its own
    predicting   their predictions, averaged: an ensemble
    parts        gradients of parts of a batch, for the norms of these

To add one: a function of one replica (`replicas.of_one` is its layout), under `vmap` over `data`.
"""
