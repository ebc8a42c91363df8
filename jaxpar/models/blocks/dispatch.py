"""Dispatch of tokens to the slots of experts, and the combination of what experts return.

    choices ──► a queue per row and expert ──► slots [experts x capacity] ──► experts ──► weighted sums of k slots

The queue of an expert has the first choices of all tokens of a row, in their order, then the second choices, and so on
(GShard: Lepikhin et al. 2020, arXiv:2006.16668). The first `capacity` choices get a slot. A choice that overflows goes
to the token's spare choices, if there are any. Rows do not compete, so slots are the same on any mesh.

Experts may share a buffer, which then has one queue for all of them (`dropless`).

A slot belongs to one choice of one token, so both directions of both functions are gathers: JAX would differentiate a
gather to a scatter, which is slower and not deterministic on GPUs.

Suffixes of arrays: s tokens of a row, k choices, n slots, d width, e experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Load(NamedTuple):
    """Numbers of choices for each expert. Shape of each [batch, experts], int32.

    Attributes:
      sent: Choices for the expert; kept + spilled + dropped.
      kept: Choices that the expert computed.
      spilled: Choices that overflowed, and that a spare choice of the token computed.
      dropped: Choices that no expert computed.
    """

    sent: jax.Array
    kept: jax.Array
    spilled: jax.Array
    dropped: jax.Array


class Slots(NamedTuple):
    """The slots of one row.

    Attributes:
      slot: Slot of each choice, or the number of slots if it has none. Shape [tokens, k], int32.
      choice: The choice (token x k + number) in each slot, or tokens x k if it is empty. Shape [slots], int32.
      expert: Expert that computes each choice, or the number of experts if none does. Shape [tokens, k], int32.
      place: Place of the expert of each slot among those that share its buffer, or their number if it is empty. Shape
        [slots], int32.
      load: Numbers of choices. Shape of each [experts].
    """

    slot: jax.Array
    choice: jax.Array
    expert: jax.Array
    place: jax.Array
    load: Load


def assign_slots(choices: jax.Array, *, per_token: int, experts: int, capacity: int, sharing: int = 1) -> Slots:
    """Assigns the slots of one row.

    Args:
      choices: Experts that a token chooses, best first; those after the first `per_token` are spare. Numbers outside of
        the experts choose none. Shape [tokens, per_token or more], int.
      per_token: Number of choices that a token has computed.
      experts: Number of experts.
      capacity: Slots of an expert, or of the experts that share a buffer.
      sharing: Number of consecutive experts that share a buffer.
    """
    tokens, buffers = choices.shape[0], experts // sharing
    end, first_choices, occupied = buffers * capacity, choices[:, :per_token], jnp.zeros(buffers, jnp.int32)
    position, counts = _queue(first_choices.T.reshape(-1) // sharing, occupied, capacity)
    position, occupied = position.reshape(per_token, tokens).T, jnp.minimum(counts, capacity)
    fits_first = position < capacity
    slots = jnp.where(fits_first, first_choices // sharing * capacity + position, end)
    expert = jnp.where(fits_first, first_choices, experts)
    is_expert = (first_choices >= 0) & (first_choices < experts)
    for number in range(per_token, choices.shape[1]):
        open_choices = is_expert & (slots == end)
        first = jnp.argmax(open_choices, axis=1)
        requests = jnp.where(jnp.any(open_choices, axis=1), choices[:, number], experts)
        position, added = _queue(requests // sharing, occupied, capacity)
        occupied = jnp.minimum(occupied + added, capacity)
        fits = (jnp.arange(per_token) == first[:, None]) & open_choices & (position < capacity)[:, None]
        slots = jnp.where(fits, (requests // sharing * capacity + position)[:, None], slots)
        expert = jnp.where(fits, requests[:, None], expert)
    slots, expert = slots.astype(jnp.int32), expert.astype(jnp.int32)
    entries = jnp.arange(tokens * per_token, dtype=jnp.int32)
    choice = jnp.full((end,), tokens * per_token, jnp.int32).at[slots.reshape(-1)].set(entries, mode="drop")
    place = jnp.full((end,), sharing, jnp.int32).at[slots.reshape(-1)].set(expert.reshape(-1) % sharing, mode="drop")
    if sharing == 1:  # the queue has counted them
        sent, kept_counts = counts, jnp.minimum(counts, capacity)
    else:
        sent, kept_counts = (
            _count(computed, experts) for computed in (first_choices, jnp.where(fits_first, first_choices, experts))
        )
    spilled = jnp.zeros_like(sent)
    if choices.shape[1] > per_token:
        spilled = _count(jnp.where((slots < end) & ~fits_first, first_choices, experts), experts)
    load = Load(sent, kept_counts, spilled, sent - kept_counts - spilled)
    return Slots(slots, choice, expert, place, load)


def _queue(requests: jax.Array, occupied: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns the place of each request in its buffer's queue, and the number of requests of each buffer."""
    buffers = occupied.shape[0]
    requests = jnp.where((requests >= 0) & (requests < buffers), requests, buffers)
    # a stable sort keeps the order of the requests within a buffer
    rank = jnp.argsort(jnp.argsort(requests, stable=True))
    counts = _count(requests, buffers)
    start = jnp.cumsum(counts) - counts - occupied
    request_start = jnp.sum(jnp.where(requests[:, None] == jnp.arange(buffers), start, 0), axis=1)
    position = jnp.where(requests < buffers, rank - request_start, capacity)
    return position, counts


def _count(choices: jax.Array, experts: int) -> jax.Array:
    """Returns the number of choices of each expert. Shape [experts], int32."""
    return jnp.sum(choices.reshape(-1, 1) == jnp.arange(experts), axis=0, dtype=jnp.int32)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Takes entries of dim 0; zeros where the index is out of range."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x_sd: jax.Array, slot_sk: jax.Array, choice_n: jax.Array) -> jax.Array:
    """Returns the token in each slot, zeros in an empty one. Shape [slots, width]."""
    return _take(x_sd, choice_n // slot_sk.shape[1])


def _dispatch_backward(slot_sk: jax.Array, g_nd: jax.Array) -> tuple[jax.Array, None, None]:
    total = jnp.sum(_take(g_nd, slot_sk.T), axis=0, dtype=_sum_dtype(g_nd.dtype))
    return total.astype(g_nd.dtype), None, None


dispatch.defvjp(lambda x, slot, choice: (dispatch(x, slot, choice), slot), _dispatch_backward)


@jax.custom_vjp
def combine(y_nd: jax.Array, weights_sk: jax.Array, slot_sk: jax.Array, choice_n: jax.Array) -> jax.Array:
    """Returns the weighted sum of each token's slots, in the dtype of `y`. Shape [tokens, width]."""
    del choice_n
    return _weighted_sum(_take_slots(y_nd, slot_sk), weights_sk)


def _take_slots(y_nd: jax.Array, slot_sk: jax.Array) -> list[jax.Array]:
    """The slots of all tokens' first choices, second choices, and so on. Shape of each [tokens, width]."""
    return [_take(y_nd, slot) for slot in slot_sk.T]


def _weighted_sum(parts_sd: list[jax.Array], weights_sk: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(_sum_dtype(parts_sd[0].dtype), weights_sk.dtype)
    parts = (w[:, None].astype(dtype) * part for w, part in zip(weights_sk.T, parts_sd, strict=True))
    return jnp.asarray(sum(parts), parts_sd[0].dtype)


def _combine_forward(y_nd: jax.Array, weights_sk: jax.Array, slot_sk: jax.Array, choice_n: jax.Array):
    parts = _take_slots(y_nd, slot_sk)
    # the smaller of the two: slots are more than choices where experts have slots to spare
    saved = parts if slot_sk.size <= y_nd.shape[0] else y_nd
    return _weighted_sum(parts, weights_sk), (saved, weights_sk, slot_sk, choice_n)


def _combine_backward(residuals: tuple, g_sd: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    saved, weights_sk, slot_sk, choice_n = residuals
    parts = saved if isinstance(saved, list) else _take_slots(saved, slot_sk)
    dtype = jnp.promote_types(_sum_dtype(g_sd.dtype), weights_sk.dtype)
    slot_weights = _take(weights_sk.reshape(-1, 1), choice_n).astype(dtype)
    dy = slot_weights * _take(g_sd, choice_n // weights_sk.shape[1])
    dw = [jnp.sum(g_sd.astype(dtype) * part, axis=-1) for part in parts]
    return dy.astype(g_sd.dtype), jnp.stack(dw, axis=-1).astype(weights_sk.dtype), None, None


combine.defvjp(_combine_forward, _combine_backward)


def _sum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums: float32 for 16 bits."""
    return jnp.promote_types(dtype, jnp.float32)
