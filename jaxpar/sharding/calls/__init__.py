"""Changes how Flax's layers behave while a step is traced, for both Linen and NNX.

    compute_dtype    the dtype that a module computes in
    methods          replaces methods of classes while a model is traced, and restores them
    norm_axes        drops from a normalization layer the named axes that no vmap or shard_map binds

`linen_model.py` and `nnx/hooks.py` use them.
"""
