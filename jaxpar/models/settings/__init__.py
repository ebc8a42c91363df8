"""Settings of models, in files without JAX, for code that reads, checks or prints a job.

    decoder, experts            the shape of a decoder: the `[model]` table of a job
    rope                        rotary frequencies of a decoder that are scaled for a longer context
    classifiers                 the same of convolutional networks, ViT and MLP
    reference_models            the names, settings and classes of all of them
    computing                   dtypes of matmuls, policies for the residuals of the backward pass, and chunks of logits
    fine_tuning                 low-rank adapters (LoRA), and the loss on preferences (DPO)

To add the settings of a model: a frozen dataclass in a file here, with its keys in the Attributes of its docstring.
"""
