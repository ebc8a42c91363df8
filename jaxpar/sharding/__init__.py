"""Goes from the names that a model gives its dims to arrays that are born where they belong.

Nouns: a `Blueprint` (a model of NNX or Linen as jaxpar sees it), a `Leaf` with the names of its dims, rules from
names to mesh axes, and `constrain`, which names the dims of an activation.

To add a Flax API: a file beside `nnx_model.py` and `linen_model.py` that returns a `Blueprint`. To let a new name of
a dim mean something: a row of `rules.NAMES`.
"""
