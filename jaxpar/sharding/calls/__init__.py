"""Calls of Flax's layers while a step is traced, for both Linen and NNX.

    compute_dtype    the dtype that a module computes in
    methods          replaces methods of classes while a model is traced, and restores them
    norm_axes        omits the named axes of a normalization layer that nothing binds

`linen_model.py` and `nnx/hooks.py` use them.
"""
