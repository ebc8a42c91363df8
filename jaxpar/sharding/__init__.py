"""Turns the names that a model gives its dims into PartitionSpecs. Only these files know NNX and Linen; the rest of
jaxpar works on pytrees.

    NNX factory or Linen module ──► Blueprint: leaves with names of dims, init, bind, collect
    a Linen module's variables ◄─► jaxpar's                                                  linen_variables.py
    parameters of a Linen module ─► gathered where the module reads them                     linen_calls.py
    those of an NNX module ─► likewise                                                       nnx_hooks.py
    a matrix ──► the matrix with a low-rank adapter                                          adapters.py
    dims of an unannotated parameter ──► names, by their use in the model                    infer_names/
    names of a parameter's dims ──► mesh axes, each with the rule that chose it              rules.py
    layers whose dims have no names ─► a stack or a list, by the shapes of its parameters    stacks.py
    names of an activation's dims ─► mesh axes, while a step is traced                       constrain.py
    dim names of other code bases ─► jaxpar's own                                            constrain.py
    an author's specs, meshes and rules, in JAX's and Flax's words ─► those of a step's mesh author/

Terms: a `Blueprint` (everything that jaxpar needs to know of a model), a `Leaf` (shape, dtype and names of one
parameter), an `AxisChoice` of mesh axes for its dims, rules from names to mesh axes.

To add a Flax API: a file beside `nnx_model.py` and `linen_model.py` that returns a `Blueprint`. To give a new dim name
a meaning: `splits` of an `Axis` in `mesh/axes.py`, or a row of `constrain.MEANINGS` for another code base's name
that means the same as one of jaxpar's. To infer names of unannotated dims: see `infer_names/`.
"""
