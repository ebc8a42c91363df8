"""Models of every trade, as their authors write them, after the examples that are published of them. See `EXAMPLES`.

    images       classifiers: convolutions, patches, MLPs
    generative   variational, adversarial, by diffusion
    decoders     language models in NNX
    experts      language models in Linen, with names of dims of their own; a mixture of experts
    sequences    recurrent, state-space, encoder and decoder
    graphs       graphs, rewards, words
    variables    modules that look into their variables, Linen inside of NNX and the other way around

To add one: a class and a row of `EXAMPLES` in the file of its trade. No model knows of jaxpar, none bends to it.
"""

import optax
from explicit_model import Explicit, Plain
from unannotated import Qwen3

from published import decoders, experts, generative, graphs, images, sequences, variables
from published.example import Example, language_loss, tokens

ELSEWHERE = {
    "qwen3": Example(
        module=lambda rngs: Qwen3(32, 16, 32, heads=4, kv_heads=2, head_dim=8, rngs=rngs),
        loss=language_loss,
        batch=tokens,
        optimizer=optax.adamw(5e-3, eps=1e-4),
    ),
    "explicit": Example(
        module=Explicit,
        plain=Plain,
        loss=language_loss,
        batch=tokens,
        optimizer=optax.adam(3e-3, eps=1e-4),
        rules={"tp": "tensor"},
    ),
}
EXAMPLES: dict[str, Example] = {
    name: example
    for examples in (
        *(each.EXAMPLES for each in (images, generative, decoders, experts, sequences, graphs, variables)),
        ELSEWHERE,
    )
    for name, example in examples.items()
}
