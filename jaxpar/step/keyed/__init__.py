"""Losses that want randomness: `loss(model, batch, key)`, found by their signature.

    seed ─► step ─► microbatch ─► key     while training
    seed ───────────────────────► key     in an evaluation: every batch has the same one, after every step

The key is that of one program on one device: on any layout, and in any number of processes, it draws the same numbers
for the rows of a microbatch. Microbatches each have their own, those of a pipeline as those of `accumulate`. Where
replicas compute by themselves (in a pipeline, and between exchanges) each folds in its number, as for dropout.

    loss         which losses want a key, and how they are called with one
    draws        what they draw for their examples, split over devices as these are
    gradients    the key, handed on as a model's own random keys are: beside the model state

To hand a loss one thing more that changes from step to step: as the key is, by an entry of `gradients.handed`.
"""
