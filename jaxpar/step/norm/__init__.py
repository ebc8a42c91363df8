"""The norm of all gradients: one sum over devices, for the metric and for an optimizer that clips by it.

    of_shards   each device adds up the squares of what it holds; then one number travels
    known       an optimizer that computes this norm, too, takes the one that is there

Written as optax has it, every gradient's squares are summed over the axes that cut it, and XLA joins those sums only
where they stand beside each other; the norm of the metric and that of `optax.clip_by_global_norm` it never joins.
"""
