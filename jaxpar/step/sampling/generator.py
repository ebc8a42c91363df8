"""Tokens after prompts, by a model on its layout: with a cache of keys and values where the model has one.

prompts ─► prefill (all tokens at once) ─► draw ─► step (one token a row) ─► draw ─► step ...

A model sees a window of the newest tokens. A row that fills it goes on with the newer half of them, from position 0.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.models.cache import Cache
from jaxpar.models.returned import goes_with_call
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques import asked
from jaxpar.plan.techniques.chosen import choose
from jaxpar.sharding.names import Compute, Tree
from jaxpar.sharding.tracing import uncollected
from jaxpar.step.sampling.draws import Sampling

Stops = Callable[[int, list[int]], bool]  # (row, the tokens it has drawn) to whether it is at its end


class Generator:
    """A model that continues rows of tokens.

    Attributes:
      layout: Where its arrays live: over data, fsdp and tensor.
      window: Tokens that it sees at once.
      known: Tokens that may be drawn, from 0; what is above is none of the text.
      cached: Whether it keeps keys and values; else each token takes a pass over the whole window.
    """

    def __init__(
        self, layout: Layout, params: Tree, model_state: Tree, *, window: int, known: int, cached: bool | None = None
    ):
        """Makes one.

        Raises:
          JaxparError: If the layout has axes that do not divide the work of one token, or the model has no cache.
        """
        apart = [axis for axis in ("pipe", "context") if layout.sizes.get(axis, 1) > 1]
        if apart or layout.parallel.sequence:
            raise refuse(
                f"sampling on {' x '.join(f'{axis} {layout.sizes[axis]}' for axis in apart) or 'sequence = true'}",
                rule="the work of one token is split over data, fsdp and tensor",
                fix="parallel.tensor=2 or parallel.fsdp=2 after the run folder",
            )
        self.layout, self.window, self.known = layout, window, known
        self._values = (params, model_state)
        bound = layout.blueprint.bind(layout.params, model_state, lambda _, value: value, Compute(train=False))
        able = all(callable(getattr(bound, name, None)) for name in ("cache", "decode"))
        able = able and goes_with_call(type(bound), "decode")
        if cached and not able:
            raise refuse(
                f"a cache for {layout.blueprint.name}",
                rule="a model with a cache has `cache` and `decode`, as jp.Decoder does",
                fix="cached=False",
            )
        self.cached = able if cached is None else cached
        self._used = asked.Used()

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, most: int, stops: Stops = lambda row, new: False
    ) -> list[list[int]]:
        """Returns the tokens after each prompt.

        Args:
          prompts: Tokens of each row, at least one.
          sampling: How they are drawn.
          most: Tokens after each prompt.
          stops: Called with the row and its new tokens after each; a row that stops draws no more.
        """
        count = len(prompts)
        more = [prompts[0]] * (-count % self.layout.replicas)  # so that rows are divided evenly
        rows = [list(each) for each in (*prompts, *more)]
        starts = [max(0, len(row) - self.window) for row in rows]
        new: list[list[int]] = [[] for _ in rows]
        done = [i >= count for i in range(len(rows))]
        pick = jax.jit(lambda logits, numbers, drawn: sampling.draw(logits[:, : self.known], numbers, drawn))
        numbers, cache, token = np.arange(len(rows), dtype=np.int32), None, np.zeros(len(rows), np.int32)
        for _ in range(most):
            moved = self._shifted(rows, starts)
            if moved or cache is None or not self.cached:
                logits, cache = self._prefilled([row[at:] for row, at in zip(rows, starts, strict=True)])
            else:
                logits, cache = self._stepped(cache, token)
            drawn = np.array([len(each) for each in new], np.int32)
            token = np.asarray(pick(logits, numbers, drawn))
            for i, row in enumerate(rows):
                row.append(int(token[i]))  # of a row that is done, so that all go on in step
                if not done[i]:
                    new[i].append(int(token[i]))
                    done[i] = stops(i, new[i])
            if all(done):
                break
        return new[:count]

    def _shifted(self, rows: list[list[int]], starts: list[int]) -> bool:
        """Moves the start of each row that is longer than the window; returns whether there is one."""
        full = [i for i, row in enumerate(rows) if len(row) - starts[i] > self.window]
        for i in full:
            starts[i] = len(rows[i]) - max(1, self.window // 2)
        return bool(full)

    def _prefilled(self, contexts: list[list[int]]) -> tuple[jax.Array, Any]:
        longest = max(len(each) for each in contexts)
        # a power of two, so that few programs are compiled; not one, which would be a step
        width = min(self.window, max(2, 1 << (longest - 1).bit_length())) if self.cached else self.window
        tokens = np.zeros((len(contexts), max(2, width)), np.int32)
        for row, each in zip(tokens, contexts, strict=True):
            row[: len(each)] = each
        lengths = np.array([len(each) for each in contexts], np.int32)
        with self._traced():
            if not self.cached:
                return self._whole(*self._values, self._put(tokens), self._put(lengths)), None
            return self._first(*self._values, self._put(tokens), self._put(lengths))

    def _stepped(self, cache: Cache, token: np.ndarray) -> tuple[jax.Array, Cache]:
        with self._traced():
            return self._next(*self._values, cache, self._put(token[:, None]))

    @cached_property
    def _first(self) -> Any:
        def prefill(params, model_state, tokens, lengths):
            model = self._bound(params, model_state)
            return model.decode(tokens, model.cache(tokens.shape[0], max(2, self.window)), lengths)

        return jax.jit(prefill)

    @cached_property
    def _next(self) -> Any:
        def step(params, model_state, cache, tokens):
            return self._bound(params, model_state).decode(tokens, cache)

        return jax.jit(step, donate_argnums=2)

    @cached_property
    def _whole(self) -> Any:
        def forward(params, model_state, tokens, lengths):
            logits = self._bound(params, model_state)(tokens)
            return jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]

        return jax.jit(forward)

    def _bound(self, params: Tree, model_state: Tree) -> Any:
        return self.layout.blueprint.bind(params, model_state, self.layout.use, Compute(train=False))

    def _put(self, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, self.layout.sharding(self.layout.batch_spec(value.shape)))

    @contextmanager
    def _traced(self):
        with jax.set_mesh(self.layout.on), uncollected(), asked.traced(self.layout, self._used, choose):
            yield
