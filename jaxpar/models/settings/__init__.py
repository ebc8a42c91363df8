"""Settings of models, apart from the modules that are made of them: what reads, checks or prints a job imports no JAX.

    decoder, vit, resnet, mlp   the shape of each reference model: the `[model]` table of a job
    computing                   how any model computes: the dtype of its matmuls, what its backward pass keeps
    logits                      how large logits are, and whether a loss makes them whole
    heads                       whether heads divide a width
    cudnn                       which attention cuDNN's fused kernel takes

To add the settings of a model: a frozen dataclass in a file here, with its keys in the Attributes of its docstring.
"""
