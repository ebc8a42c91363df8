"""Settings of models, in files without JAX, for code that reads, checks or prints a job.

    decoder, vit, resnet, mlp   the shape of each reference model: the `[model]` table of a job
    computing                   how any model computes: the dtype of its matmuls, what its backward pass saves
    logits                      the size of logits, and whether a loss computes them in chunks
    heads                       whether heads divide a width
    cudnn                       which attention cuDNN's fused kernel supports

To add the settings of a model: a frozen dataclass in a file here, with its keys in the Attributes of its docstring.
"""
