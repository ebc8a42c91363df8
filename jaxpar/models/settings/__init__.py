"""Settings of models, in files without JAX, for code that reads, checks or prints a job.

    decoder, vit, resnet, mlp   the shape of each reference model: the `[model]` table of a job
    convolutional               the same of AlexNet, VGG, GoogLeNet and U-Net
    table                       the names, settings and classes of all of them
    computing                   names of dtypes for matmuls, and of policies for the residuals of the backward pass
    logits                      the size of logits, and whether a loss computes them in chunks
    adapters                    low-rank adapters (LoRA)

To add the settings of a model: a frozen dataclass in a file here, with its keys in the Attributes of its docstring.
"""
