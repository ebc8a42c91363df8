"""Stochastic losses, `loss(model, batch, key)`, recognized by their signature.

    seed ─► step ─► microbatch ─► key     in training
    seed ───────────────────────► key     in evaluation: the same key for every batch, after every step

On any layout and any number of processes, the key draws the same numbers for the rows of a microbatch as on one device.
Each microbatch has its own key, in a pipeline and with `accumulate`. Replicas that compute separately (in a pipeline,
and between sync rounds) fold their number into the key, as for dropout.

`loss` recognizes losses that take a key, and adds it to the model state, like a model's own random keys.
To pass a loss another value that changes between steps: add an entry in `loss.carry_key`, like the key.
"""
