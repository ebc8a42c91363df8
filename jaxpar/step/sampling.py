"""Generates tokens after prompts with a model on its layout, with a KV cache if the model has one.

prompts ─► prefill (all tokens at once) ─► draw ─► step (one token per row) ─► draw ─► step ...

A model gets a window of the newest tokens. A row that fills it continues with the newer half, from position 0.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import Keywords, check_ranges, refuse
from jaxpar.models.cache import KVCache
from jaxpar.models.output_dtype import belongs_to_call
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.read_parameter import read_parameter
from jaxpar.parallel.state_specs import abstract_params, batch_sharding
from jaxpar.parallel.techniques import all_techniques
from jaxpar.sharding.names import Compute, Tree
from jaxpar.step.compiler import pause_gc

# Draws the next token of each row from logits.


@dataclass(frozen=True, kw_only=True)
class Sampling(Keywords):
    """Settings of sampling.

    Attributes:
      temperature: Divides the logits; 0 takes the most likely token.
      top_k: Draws from the k most likely tokens; 0 from all (Fan et al. 2018, arXiv:1805.04833).
      top_p: Draws from the smallest set of most likely tokens with this total probability (Holtzman et al. 2019,
        arXiv:1904.09751), after top_k.
      seed: Seed of the random draws. A row's tokens depend on the seed and the row's number, not on other rows.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        ranges = {"temperature": (0.0, 1e6), "top_k": (0, 2**31 - 1), "top_p": (0.0, 1.0), "seed": (0, 2**32 - 1)}
        check_ranges(self, "", ranges)

    def draw(self, logits: jax.Array, rows: jax.Array, count: jax.Array) -> jax.Array:
        """Draws the next token of each row. Shape [batch], int32.

        Args:
          logits: Shape [batch, vocab].
          rows: The number of each row. Shape [batch], int32.
          count: Number of tokens drawn so far in each row. Shape [batch], int32.
        """
        logits = logits.astype(jnp.float32)
        if not self.temperature:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        order, likeliest = self.candidates(logits)
        row_key = lambda row, index: jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), row), index)  # noqa: E731
        ranks = jax.vmap(jax.random.categorical)(jax.vmap(row_key)(rows, count), likeliest)
        return jnp.take_along_axis(order, ranks[:, None], axis=-1)[:, 0].astype(jnp.int32)

    def candidates(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns tokens, most likely first, and their scaled logits, -inf for tokens that cannot be drawn.

        Args:
          logits: Shape [batch, vocab], float32.

        Returns:
          Both [batch, vocab].
        """
        order = jnp.argsort(-logits, axis=-1, stable=True)
        scaled = jnp.take_along_axis(logits, order, axis=-1) / self.temperature
        if self.top_k:
            scaled = jnp.where(jnp.arange(scaled.shape[-1]) < self.top_k, scaled, -jnp.inf)
        if self.top_p < 1:
            probs = jax.nn.softmax(scaled, axis=-1)
            cumulative = jnp.cumsum(probs, axis=-1) - probs  # probability of the more likely tokens
            is_first = jnp.arange(scaled.shape[-1]) == 0
            scaled = jnp.where((cumulative < self.top_p) | is_first, scaled, -jnp.inf)
        return order, scaled


Stops = Callable[[int, list[int]], bool]  # (row, its new tokens) to whether the row is finished


class Generator:
    """Continues rows of tokens.

    Attributes:
      layout: The layout of the model, over data, fsdp and tensor.
      window: Length of the context.
      vocab_size: Size of the tokenizer's vocabulary; tokens from this number on are never drawn.
      cached: Whether the model has a KV cache; otherwise each token needs a forward pass over the whole window.
    """

    def __init__(
        self,
        layout: Layout,
        params: Tree,
        model_state: Tree,
        *,
        window: int,
        vocab_size: int,
        cached: bool | None = None,
    ):
        """Binds the model to its parameters.

        Raises:
          JaxparError: If the layout uses axes that cannot split the work of one token, or the model has no cache.
        """
        axes = [axis for axis in ("pipe", "context") if layout.sizes.get(axis, 1) > 1]
        if axes or layout.parallel.sequence:
            raise refuse(
                f"sampling on {' x '.join(f'{axis} {layout.sizes[axis]}' for axis in axes) or 'sequence = true'}",
                rule="the work of one token is split over data, fsdp and tensor",
                fix="parallel.tensor=2 or parallel.fsdp=2 after the run folder",
            )
        self.layout, self.window, self.vocab_size = layout, window, vocab_size
        self._values = (params, model_state)
        bound = layout.blueprint.bind(
            abstract_params(layout), model_state, lambda _, value: value, Compute(train=False)
        )
        has_cache = all(callable(getattr(bound, name, None)) for name in ("cache", "decode"))
        has_cache = has_cache and belongs_to_call(type(bound), "decode")
        if cached and not has_cache:
            raise refuse(
                f"a cache for {layout.blueprint.name}",
                rule="a model with a cache has `cache` and `decode`, as jp.Decoder does",
                fix="cached=False",
            )
        self.cached = has_cache if cached is None else cached
        self._used = all_techniques.ModelUse()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stops: Stops = lambda row, new: False,
    ) -> list[list[int]]:
        """Generates tokens after each prompt, and returns them.

        Args:
          prompts: Tokens of each row, at least one.
          sampling: Settings of sampling.
          max_new_tokens: Maximum number of new tokens per row.
          stops: Called with the row and its new tokens after each token; returns whether the row is finished.
        """
        count = len(prompts)
        padding = [prompts[0]] * (-count % self.layout.replicas)  # pads, so that replicas get equal numbers of rows
        rows = [list(tokens) for tokens in (*prompts, *padding)]
        starts = [max(0, len(row) - self.window) for row in rows]
        new: list[list[int]] = [[] for _ in rows]
        is_done = [i >= count for i in range(len(rows))]
        pick = jax.jit(
            lambda logits, numbers, num_drawn: sampling.draw(logits[:, : self.vocab_size], numbers, num_drawn)
        )
        numbers, cache, token = np.arange(len(rows), dtype=np.int32), None, np.zeros(len(rows), np.int32)
        for _ in range(max_new_tokens):
            moved = self._shift_rows(rows, starts)
            if moved or cache is None or not self.cached:
                logits, cache = self._prefill([row[start:] for row, start in zip(rows, starts, strict=True)])
            else:
                logits, cache = self._decode_step(cache, token)
            num_drawn = np.array([len(tokens) for tokens in new], np.int32)
            token = np.asarray(pick(logits, numbers, num_drawn))
            for i, row in enumerate(rows):
                row.append(int(token[i]))  # also in finished rows, to keep all rows aligned
                if not is_done[i]:
                    new[i].append(int(token[i]))
                    is_done[i] = stops(i, new[i])
            if all(is_done):
                break
        return new[:count]

    def _shift_rows(self, rows: list[list[int]], starts: list[int]) -> bool:
        """Advances the start of each row that is longer than the window; returns whether it changed any row."""
        full = [i for i, row in enumerate(rows) if len(row) - starts[i] > self.window]
        for i in full:
            starts[i] = len(rows[i]) - max(1, self.window // 2)
        return bool(full)

    def _prefill(self, contexts: list[list[int]]) -> tuple[jax.Array, Any]:
        longest = max(len(context) for context in contexts)
        # a power of two, so that few programs are compiled; at least 2, as one token would be a decode step
        width = min(self.window, max(2, 1 << (longest - 1).bit_length())) if self.cached else self.window
        tokens = np.zeros((len(contexts), max(2, width)), np.int32)
        for row, context in zip(tokens, contexts, strict=True):
            row[: len(context)] = context
        lengths = np.array([len(context) for context in contexts], np.int32)
        with self._tracing():
            if not self.cached:
                return self._whole(*self._values, _put(self.layout, tokens), _put(self.layout, lengths)), None
            return self._first(*self._values, _put(self.layout, tokens), _put(self.layout, lengths))

    def _decode_step(self, cache: KVCache, token: np.ndarray) -> tuple[jax.Array, KVCache]:
        with self._tracing():
            return self._next(*self._values, cache, _put(self.layout, token[:, None]))

    @cached_property
    def _first(self) -> Any:
        def prefill(params, model_state, tokens, lengths):
            model = self._bind_model(params, model_state)
            return model.decode(tokens, model.cache(tokens.shape[0], max(2, self.window)), lengths)

        return jax.jit(prefill)

    @cached_property
    def _next(self) -> Any:
        def step(params, model_state, cache, tokens):
            return self._bind_model(params, model_state).decode(tokens, cache)

        return jax.jit(step, donate_argnums=2)

    @cached_property
    def _whole(self) -> Any:
        def forward(params, model_state, tokens, lengths):
            logits = self._bind_model(params, model_state)(tokens)
            return jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]

        return jax.jit(forward)

    def _bind_model(self, params: Tree, model_state: Tree) -> Any:
        return self.layout.blueprint.bind(
            params, model_state, partial(read_parameter, self.layout), Compute(train=False)
        )

    @contextmanager
    def _tracing(self):
        with (
            jax.set_mesh(self.layout.device_mesh),
            pause_gc(),
            all_techniques.tracing(self.layout, self._used),
        ):
            yield


def _put(layout: Layout, value: np.ndarray) -> jax.Array:
    return jax.device_put(value, batch_sharding(layout, value.shape))
