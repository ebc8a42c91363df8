"""What a model's author says of sharding, in the words of JAX and Flax.

    explicit         out_sharding, reshard, with_sharding_constraint, shard_map, boxes: constraints on a step's mesh
    value_specs      specs written on the values of parameters: initializers' out_sharding, device_put
    rules_in_force   logical_axis_rules around a model: what its names mean

The axes that an author names are those of the author's mesh. On a layout's mesh each is an axis of that name, or what a
rule says of it; an author's only axis of examples is all axes of examples. The user's `Parallel(rules=...)` come first.
To hear one more way: a function of JAX or Flax that `explicit` replaces, or a kind of metadata in `nnx_model.names_in`.
"""
