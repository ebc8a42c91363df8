"""A decoder whose settings make it a Llama, GPT-2, Qwen, Mistral, Gemma, Phi-3, OLMo 2, SmolLM3, Granite or GPT-NeoX.

                 position  norm   gated  use_bias  tied
Llama (default)  rotary    rms    yes    no        no
GPT-2            learned   layer  no     yes       yes

The other families, as settings: `models/huggingface/families.py`.
"""

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.auxiliary import add_sums
from jaxpar.models.blocks.attention_mask import Documents, get_activations
from jaxpar.models.blocks.lookup import COLUMNS, ROWS, look_up
from jaxpar.models.cache import KVCache
from jaxpar.models.custom_gradients import logits, mask_padding
from jaxpar.models.dim_names import constrain
from jaxpar.models.layer_stack import run_cached, run_stack, stack
from jaxpar.models.layers import Block, BlockConfig, LayerKind, Norm, bias, dropout, padded_weight, weight
from jaxpar.models.rotary import Rope
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.models.stack import is_intercepted

HEAD = ("embed", "vocab")


class RouterBias(nnx.Variable):
    """Added to scores of experts for their choice, not to weights. Shape [layers with experts, experts], float32."""


class Decoder(nnx.Module):
    """Tokens to logits of the next token.

    Args:
      settings: Shape and kind.
      rngs: Streams `params` and `dropout`.
    """

    def __init__(self, settings: DecoderConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        self.remat = "none"
        self.deterministic = False
        # an embedding that is also the head is sharded like the head, over the vocabulary; else by columns
        names = ("vocab", "embed") if s.tied else (ROWS, COLUMNS)
        scale = s.dim**-0.5 if s.tied else 1.0
        self.embed = padded_weight(rngs, (s.vocab, s.dim), names, scale, dim=0, size=s.vocab_rows)
        self.positions = weight(rngs, (s.seq, s.dim), ("seq_table", "embed"), 0.02) if s.position == "learned" else None

        self.kinds = layer_kinds(s)
        shape = BlockConfig(
            dim=s.dim,
            heads=s.heads,
            kv_heads=s.kv_heads or s.heads,
            head_dim=s.head_width,
            hidden=s.width,
            norm=s.norm,
            norm_eps=s.norm_eps,
            norm_position=s.norm_position,
            qk_norm=s.qk_norm,
            gated=s.gated,
            activation=s.activation_name,
            biases=s.biased_parts,
            parallel_residual=s.parallel_residual,
            shared_norm=s.shared_norm,
            attention_scale=s.attention_scale,
            attention_softcap=s.attention_softcap,
            residual_scale=s.residual_scale,
            causal=True,
            dropout=s.dropout,
            out_scale=(2 * s.layers) ** -0.5,
        )
        e, numbers = s.experts, s.layers_with_experts
        block = partial(_mixture().MixtureBlock, shape, e) if e.count else partial(Block, shape)
        self.blocks = stack(lambda rngs: block(rngs=rngs), len(numbers) or s.layers, rngs)
        self.router_bias = RouterBias(jnp.zeros((len(numbers), e.count))) if e.count and e.balance_rate else None
        if s.has_dense_layers:
            from jaxpar.models import interleaved

            self.first_blocks, self.dense_blocks = interleaved.make_dense_layers(shape, numbers, s.layers, rngs=rngs)
        self.norm = Norm(s.dim, kind=s.norm, eps=s.norm_eps)
        shape, size = (s.dim, s.vocab), s.vocab_rows
        self.head = padded_weight(rngs, shape, HEAD, s.dim**-0.5, dim=1, size=size) if not s.tied else None
        self.head_bias = bias(s.head_bias, (size,), HEAD[1:])
        self.rngs = nnx.Rngs(dropout=rngs.dropout()) if s.dropout else None

    @property
    def vocab(self) -> int:
        """Tokens of the vocabulary: the head's entries after them are padding."""
        return self.settings.vocab

    @property
    def head_name(self) -> str | None:
        """The parameter that maps hidden states to logits: see `jaxpar.step.head.head_protocol`.

        None with a softcap or a bias, which a loss of hidden states and a matrix alone does not know.
        """
        if self.settings.logits_softcap or self.settings.head_bias:
            return None
        return "embed" if self.head is None else "head"

    def __call__(
        self, tokens_bs: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Logits [batch, seq, vocab].

        Args:
          tokens_bs: Tokens. Shape [batch, seq], int32.
          segments: If several documents share a row, the index of each token's document, ascending. Shape [batch, seq].
          positions: Position of each token in its document. Shape [batch, seq].
        """
        table = self.embed[...]
        return self._compute_logits(self._hidden(tokens_bs, table, Documents(segments, positions)), table)

    def hidden(
        self, tokens_bs: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Hidden states before the head [batch, seq, dim], for a loss that never holds all logits."""
        return self._hidden(tokens_bs, self.embed[...], Documents(segments, positions))

    def _hidden(self, tokens_bs: jax.Array, table: jax.Array, documents: Documents) -> jax.Array:
        s = self.settings
        x = self._embed_tokens(table, tokens_bs, documents.positions)
        keys = None
        if self.rngs is not None and not self.deterministic:
            first, *_ = keys = jax.random.split(self.rngs.dropout(), s.layers + 1)
            x, keys = dropout(x, s.dropout, first), keys[1:]
        stream = documents.attach(x)
        stream = self._run_mixtures(stream, keys) if s.experts.count else self._run_stack(stream, keys)
        return self._final_norm(get_activations(stream), looped=s.scan)

    def _run_stack(self, stream: object, inputs: object) -> Any:
        return run_stack(self.blocks, stream, inputs, policy=self.remat, scan=self.settings.scan, kinds=self.kinds)

    def _run_mixtures(self, stream: Any, keys: jax.Array | None) -> dict:
        """Applies layers of which all or some have experts, and adds the losses of their routers to the loss."""
        s, mixture = self.settings, _mixture()
        arrays = stream if isinstance(stream, dict) else {"x": stream}
        numbers = s.layers_with_experts
        stream = arrays | {"router": mixture.RouterSums.zeros(arrays["x"].shape[0], len(numbers), s.experts.count)}
        bias = None if self.router_bias is None else self.router_bias[...]
        if s.has_dense_layers:
            of_experts = None if keys is None else keys[jnp.array(numbers)]
            inputs = mixture.LayerInputs(of_experts, jnp.arange(len(numbers)), bias)
            stream = self._interleaved().run(stream, keys, inputs, policy=self.remat, scan=s.scan)
        else:
            stream = self._run_stack(stream, mixture.LayerInputs(keys, jnp.arange(s.layers), bias))
        self._add_router_sums(stream["router"])
        return stream

    def _interleaved(self) -> Any:
        from jaxpar.models.interleaved import DenseAndExpertLayers, LayerOrder

        order = LayerOrder.from_numbers(self.settings.layers_with_experts, self.settings.layers)
        return DenseAndExpertLayers(order, self.first_blocks or (), self.dense_blocks, self.blocks, self.kinds)

    def _final_norm(self, x: jax.Array, *, looped: bool = False) -> jax.Array:
        """Hidden states, of which a matmul with the head makes logits up to a bias and a softcap."""
        return _scale(self.norm(x, looped=looped), self.settings.logits_scale)

    def _add_router_sums(self, sums: Any) -> None:
        """Adds the losses of the routers to the loss, and moves the bias towards experts with few choices."""
        e, s = self.settings.experts, self.settings
        losses = sums.losses / len(s.layers_with_experts)
        sent, rows = jnp.sum(sums.sent), jnp.float32(sums.losses.shape[0])
        measures = {
            "balance": (jnp.sum(losses[:, 0]), rows),
            "router_z": (jnp.sum(losses[:, 1]), rows),
            "spilled": (jnp.sum(sums.lost[:, 0]), sent),
            "refused" if e.overflow == "refuse" else "dropped": (jnp.sum(sums.lost[:, 1]), sent),
        }
        load = jnp.sum(sums.sent, axis=0)
        if not is_intercepted():  # a stage of a pipeline has a microbatch of one replica, whose maximum is another one
            measures["load_max"] = jnp.sum(jnp.max(load, axis=-1)), jnp.sum(jnp.mean(load, axis=-1))
        add_sums(e.balance * losses[:, 0] + e.router_z * losses[:, 1], measures)
        if self.router_bias is not None and not self.deterministic:
            step = jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
            self.router_bias[...] = self.router_bias[...] + e.balance_rate * jax.lax.stop_gradient(step)

    def cache(self, rows: int, positions: int, dtype=jnp.float32) -> KVCache:
        """An empty cache for `rows` sequences of at most `positions` tokens."""
        s = self.settings
        shape = (rows, positions, s.kv_heads or s.heads, s.head_width)
        return KVCache.empty(layers=s.layers, shape=shape, dtype=dtype)

    def decode(
        self, tokens_bs: jax.Array, cache: KVCache, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Logits [batch, vocab] of the token after each row's last, and the updated cache.

        Args:
          tokens_bs: Prompts, from position 0, for an empty cache; or one token per row, at its next position.
          cache: From `cache`, or from the previous call.
          lengths: Tokens in each prompt; the padding after them is never attended to. Shape [batch], int32.
        """
        rows, count = tokens_bs.shape
        positions = jnp.arange(count)[None] + (jnp.zeros((rows, 1), jnp.int32) if count > 1 else cache.length[:, None])
        table = self.embed[...]
        x = self._embed_tokens(table, tokens_bs, positions)
        if self.settings.has_dense_layers:
            x, cache = self._interleaved().run_cached(x, cache, positions)
        else:
            x, cache = run_cached(self.blocks, x, cache, positions, kinds=self.kinds)
        ends = cache.length + 1 if lengths is None else lengths
        last = jnp.take_along_axis(x, (ends - 1)[:, None, None], axis=1) if count > 1 else x
        return self._compute_logits(self._final_norm(last), table)[:, 0], KVCache(cache.keys, cache.values, ends)

    def _embed_tokens(self, table: jax.Array, tokens_bs: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        x = jnp.take(table, tokens_bs, axis=0) if self.head is None else look_up(table, tokens_bs)
        x = _scale(x, self.settings.embed_scale)
        if self.positions is not None:
            rows = self.positions[...]
            x = x + (rows[: tokens_bs.shape[1]] if positions is None else jnp.take(rows, positions, axis=0))
        # a table sharded by rows is looked up on each device and summed; with seq sharded first, XLA would gather it
        return constrain(constrain(x, "batch", None, "embed"), "batch", "seq", "embed")

    def _compute_logits(self, x: jax.Array, table: jax.Array) -> jax.Array:
        values = (
            jnp.einsum("bsd,dv->bsv", x, table.T)
            if self.head is None
            else logits(x, self.head[...], looped=self.settings.scan)
        )
        values = values if self.head_bias is None else values + self.head_bias[...]
        if cap := self.settings.logits_softcap:
            values = cap * jnp.tanh(values / cap)
        values = mask_padding(values, self.vocab)
        # logits stay sharded over the vocabulary: the loss sums over it, and never needs all of a token's logits
        return constrain(values, "batch", "seq", "vocab")


def layer_kinds(settings: DecoderConfig) -> tuple[LayerKind, ...]:
    """Returns the kinds of a decoder's layers, which repeat over its layers."""
    s = settings
    kinds = []
    yarn = s.rope_yarn if s.rope_yarn.factor else None
    longrope = replace(s.longrope, attention_factor=s.longrope.magnitude(s.seq)) if s.longrope.seq else None
    for window, base, factor in s.layer_attention:
        rotates = s.position == "rotary" and base > 0
        rope = Rope(base, tuple(s.rope_stretch), factor, s.rope_share, yarn, longrope) if rotates else None
        kinds.append(LayerKind(rope, window or None))
    return tuple(kinds)


def _scale(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _mixture() -> ModuleType:
    """The module of mixtures, which a dense decoder does not load."""
    from jaxpar.models import mixture

    return mixture
