"""Shardings that a model's author wrote with JAX and Flax.

    explicit         out_sharding, reshard, with_sharding_constraint, shard_map, boxes: constraints on a step's mesh
    value_specs      specs written on the values of parameters: initializers' out_sharding, device_put
    rules_in_force   logical_axis_rules around a model: names of dims to axes

The author names axes of the author's own mesh. On a layout's mesh such an axis is the one of the same name, or those
that a rule gives it; if the author splits examples over one axis, it stands for all axes of the layout that split
examples. The user's `Parallel(rules=...)` come first. To support another
API: a function of JAX or Flax that `explicit` replaces, or a kind of metadata in `nnx_model.metadata_names`.
"""
