"""The global gradient norm: one sum over devices, for the metric and for an optimizer that clips by it.

    of_shards   each device sums the squares of its shards; then one scalar is all-reduced
    known       reuses this norm in an optimizer that computes it too

As optax writes it, the squares of each gradient are summed over the axes that shard it. XLA merges those sums only if
they are adjacent, and never merges the norm of the metric with that of `optax.clip_by_global_norm`.
"""
