"""Shardings that a model's author wrote with JAX and Flax.

    explicit         out_sharding, reshard, with_sharding_constraint, shard_map, boxes: constraints on a step's mesh
    value_specs      specs written on the values of parameters: initializers' out_sharding, device_put
    rules_in_force   logical_axis_rules around a model: the axes of its names

The author names axes of the author's own mesh. On a layout's mesh each is an axis of that name, or follows a rule; an
author's only axis of examples is all axes of examples. The user's `Parallel(rules=...)` come first. To support another
API: a function of JAX or Flax that `explicit` replaces, or a kind of metadata in `nnx_model.names_in`.
"""
