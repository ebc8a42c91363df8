"""Settings of models, in files without JAX, for code that reads, checks or prints a job.

    decoder, experts            the shape of a decoder: the `[model]` table of a job
    classifiers                 the same of convolutional networks, ViT and MLP
    table                       the names, settings and classes of all of them
    computing                   names of dtypes for matmuls, and of policies for the residuals of the backward pass
    logits                      the size of logits, and whether a loss computes them in chunks
    fine_tuning                 low-rank adapters (LoRA), and the loss on preferences (DPO)

To add the settings of a model: a frozen dataclass in a file here, with its keys in the Attributes of its docstring.
"""
