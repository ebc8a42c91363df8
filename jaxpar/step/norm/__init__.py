"""The global gradient norm: one sum over devices, for the metric and for an optimizer that clips by it.

    sharded   each device sums the squares of its shards; then one scalar is all-reduced, and the optimizer reuses it

Optax's code sums the squares of each gradient over the axes that shard it. XLA merges these all-reduces only if they
are adjacent, and never merges the norm of the metric with that of `optax.clip_by_global_norm`.
"""
