"""Reference models, and functions that any model calls and the training step implements; models know no mesh.

    constrain(x, "batch", "seq", "embed")   names the dims of an activation              dim_names.py
    attention(q, k, v, causal=True)         runs as the layout of the step says          islands.py
                                            long sequences on one device: blockwise      blocks/
    segments=, positions= of a call         documents packed into one row                blocks/attention_mask.py
    pipelined(layers, x)                    marks where a pipeline splits the model      stack.py
    remat = "none" as an attribute          the residuals of each layer                  remat.py
    hidden, head_name of a model            a loss that never holds all logits           ../step/head/head_protocol.py
    cache, decode                           generates token by token with a KV cache     cache.py
    low_rank_sum(w, a, b)                   a matrix plus its LoRA adapter               low_rank.py
    outputs of a model to its loss          float32, whatever it computes in             output_dtype.py
    swiglu(gate, up), activate(x, name)     backward passes that need less memory        custom_gradients.py

Terms: the settings of a model (a frozen dataclass: the `[model]` table of a job), dim names, a stack of equal
layers, an island (a function that the step implements).

To add a model: its settings in `settings/`, a file with its module, parameters named by `layers.weight`, and, if jobs
may name it, a row of `settings/reference_models.REFERENCE_MODELS`. To add an island: see `islands.py`.
"""
