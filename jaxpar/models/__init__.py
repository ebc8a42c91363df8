"""Reference models, and the functions by which any model speaks to the step that trains it: names of dims, no mesh.

    constrain(x, "batch", "seq", "embed")   what the dims of an activation are called    named.py
    attention(q, k, v, causal=True)         runs as the layout of the step says          islands.py
                                            long rows on one device: block by block      blocks/
    segments=, positions= of a call         documents that share a row                   blocks/documents.py
    pipelined(layers, x)                    where a pipeline cuts the model              stack.py
    remat = "none" as an attribute          what the backward pass keeps of each layer   remat.py
    hidden, head_name of a model            a loss that never has all logits             ../step/head/offered.py
    cache, decode                           a token at a time, keys and values kept      cache.py
    low_rank_sum(w, a, b)                   a matrix with an adapter beside it           low_rank.py
    what a model returns to its loss        float32, whatever it computes in             returned.py
    swiglu(gate, up), logits(x, head)       a backward pass of less memory than JAX's    own_backward.py

Nouns: the settings of a model (a frozen dataclass: the `[model]` table of a job), names of dims, a stack of equal
layers, an island.

To add a model: its settings in `settings/`, a file with its module, parameters named by `layers.weight`, and, if jobs
may name it, a row of `job/parts/names.MODELS` and one of `job/parts/models.MADE`. To add an island: see `islands.py`.
"""
