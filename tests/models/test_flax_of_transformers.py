"""Flax models of transformers as its last release with Flax has them, unedited: each trains as a plain optax loop does.

GPT2     a decoder; its head is the embedding, out of `module.variables`; kernels stored transposed
Bert     an encoder; masked tokens; tied to the embedding under another name
T5       encoder and decoder; relative positions; no biases
ViT      patches of images; a class token
Whisper  frames of sound and tokens; 1-dim convolutions; six heads, which tensor 2 divides
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest

import jaxpar as jp

try:  # it takes seconds to import, which only the tests themselves do
    FOUND = version("transformers")
except PackageNotFoundError:
    FOUND = "none"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOUND.startswith("4."), reason=f"needs the last transformers with Flax, 4.57: {FOUND}"),
]

ROWS, SEQ, VOCAB, DIM = 8, 8, 40, 24
TOKENS = np.zeros([1, SEQ], np.int32)
SGD = optax.sgd(0.1, 0.9)  # not Adam: the bias of keys has no gradient but for rounding, which Adam would scale up


def gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule

    config = GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=DIM, n_layer=2, n_head=2)
    return FlaxGPT2LMHeadModule(config), lambda batch: (batch["tokens"], batch["ones"], batch["places"])


def bert():
    from transformers import BertConfig
    from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLMModule

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * DIM,
        max_position_embeddings=SEQ,
    )  # fmt: skip
    zero = lambda batch: jnp.zeros_like(batch["tokens"])  # noqa: E731
    return FlaxBertForMaskedLMModule(config), lambda batch: (
        batch["tokens"], batch["ones"], zero(batch), batch["places"], None
    )  # fmt: skip


class OfItsTime:
    """jax.numpy as it was when transformers' T5 was written: JAX has since renamed the arguments of `clip`."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    def clip(self, x, a_min=None, a_max=None):
        return jnp.clip(x, a_min, a_max)


def t5():
    from transformers import T5Config
    from transformers.models.t5 import modeling_flax_t5

    modeling_flax_t5.jnp = OfItsTime()
    config = T5Config(
        vocab_size=VOCAB, d_model=DIM, d_kv=12, d_ff=2 * DIM, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return modeling_flax_t5.FlaxT5ForConditionalGenerationModule(config), lambda batch: (
        batch["tokens"], batch["ones"], batch["tokens"], batch["ones"]
    )  # fmt: skip


def vit():
    from transformers import ViTConfig
    from transformers.models.vit.modeling_flax_vit import FlaxViTForImageClassificationModule

    config = ViTConfig(
        hidden_size=DIM, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * DIM, image_size=8,
        patch_size=4, num_labels=10,
    )  # fmt: skip
    return FlaxViTForImageClassificationModule(config), lambda batch: (batch["image"],)


def whisper():
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_flax_whisper import FlaxWhisperForConditionalGenerationModule

    config = WhisperConfig(
        vocab_size=VOCAB, d_model=DIM, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=2 * DIM, decoder_ffn_dim=2 * DIM, max_source_positions=SEQ,
        max_target_positions=SEQ, num_mel_bins=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return FlaxWhisperForConditionalGenerationModule(config), lambda batch: (
        batch["sound"], batch["tokens"], batch["ones"], batch["places"]
    )  # fmt: skip


MODELS = {"gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit, "whisper": whisper}


def batch_of(rows):
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(3, VOCAB, [rows, SEQ]).astype(np.int32),
        "ones": np.ones([rows, SEQ], np.int32),
        "places": np.broadcast_to(np.arange(SEQ, dtype=np.int32), [rows, SEQ]).copy(),
        "image": rng.random([rows, 8, 8, 3], np.float32),
        "sound": rng.random([rows, 4, 2 * SEQ], np.float32),
        "labels": rng.integers(0, 10, rows).astype(np.int32),
    }


def loss_of(inputs):
    def loss(model, batch):
        logits = model(*inputs(batch)).logits
        targets = batch["labels"] if logits.ndim == 2 else batch["tokens"]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return each.sum(), each.size

    return loss


@cache
def described(name):
    """Returns a Linen module, the model that jaxpar takes, and its loss."""
    module, inputs = MODELS[name]()
    return module, jp.from_linen(module, *inputs(batch_of(1))), loss_of(inputs)


@cache
def plainly(name):
    """Returns what a plain loop makes of it."""
    module, model, loss = described(name)
    return plain_loop.train(model, module, loss, SGD, batch_of(ROWS))


# T5 and Whisper are in CI in bf16, below
@plain_loop.each({name: f"transformers {name}" for name in MODELS}, zero_3=[], rarely=["t5", "whisper"])
def test_a_model_of_transformers_trains_as_a_plain_loop_does(name, layout):
    _, model, loss = described(name)
    plain_loop.beside(plainly(name), layout, model, loss, SGD, batch_of(ROWS))


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_is_computed_in_bf16(name):
    _, model, loss = described(name)
    step = jp.train_step(jp.compose(model, jp.Parallel(), jax.devices()[:1]), loss, SGD, precision="bf16")
    step.lower(step.abstract(), batch_of(ROWS))
    assert step.compiler.matmuls.share == 1
