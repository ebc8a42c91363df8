"""Calls of Flax's layers while a step is traced, of either API.

    compute_dtype    the dtype that a module computes in
    methods          replaces methods of classes while a model is traced, and puts them back
    norm_axes        leaves out of a normalization layer the named axes that nothing binds

`linen_model.py` and `nnx/hooks.py` beside this are what calls them.
"""
