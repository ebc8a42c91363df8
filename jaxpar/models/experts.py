"""The island of a mixture of experts: `jp.mixture` brings tokens and experts together.

    model ──► jp.mixture(expert, params, x, choices, weights) ──► outside of a step: a loop over the experts
                                                              └─► in a step: by the technique of the axis `expert`

Suffixes of arrays: b batch, s tokens, k choices, n slots, d width, e experts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import nearest_divisor, refuse
from jaxpar.models.blocks.dispatch import Load, Slots, assign_slots
from jaxpar.models.islands import implementation

Tree = Any
Expert = Callable[[Tree, jax.Array], jax.Array]  # (parameters of one expert, tokens [n, d]) to [n, d]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choices of all tokens, as an implementation of `jp.mixture` receives them.

    Attributes:
      choices: Experts of each token, best first; those after the first k are spare. Shape [batch, seq, k or more].
      weights: Weights of the first k. Shape [batch, seq, k].
      experts: Number of experts.
      capacity: Slots of a buffer for the tokens of a row.
      sharing: Number of experts that share a buffer.
    """

    choices: jax.Array
    weights: jax.Array
    experts: int
    capacity: int
    sharing: int = 1

    @property
    def buffers(self) -> int:
        """Number of buffers."""
        return self.experts // self.sharing

    def slots(self) -> Slots:
        """The slots of each row, see `assign_slots`; all arrays with a leading dim batch."""

        def assign_row(choices: jax.Array) -> Slots:
            count = self.weights.shape[-1]
            return assign_slots(
                choices, per_token=count, experts=self.experts, capacity=self.capacity, sharing=self.sharing
            )

        return jax.vmap(assign_row)(self.choices)


def mixture(
    expert: Expert,
    params: Tree,
    x: jax.Array,
    choices: jax.Array,
    weights: jax.Array,
    *,
    capacity: float | None = None,
    imbalance: float | None = None,
    buffers: int = 0,
    counted: jax.Array | None = None,
) -> tuple[jax.Array, Load]:
    """Sends each token to the experts that it chose, and returns the weighted sums of what they compute.

    In a step whose mesh has an axis `expert`, each of its devices computes some of the experts, and tokens travel to
    them and back by two all-to-alls. The result is that of one device: which choices overflow depends on the row alone.

    Args:
      expert: Maps (parameters of one expert, tokens [n, dim]) to [n, dim], each token independently of all others.
      params: Parameters of all experts; every array has the experts as dim 0. Name that dim `expert`.
      x: Tokens. Shape [batch, seq, dim].
      choices: Experts of each token, different ones, best first, as of `jax.lax.top_k`. Those after the first k are
        spare: a choice that finds its expert full goes to the next spare one, with its own weight ("spill"). Without
        spare ones it is dropped, and the sum lacks it. Shape [batch, seq, k or more], int.
      weights: Weights of the first k choices. Shape [batch, seq, k].
      capacity: Slots of an expert over its mean number of tokens: each expert takes ceil(capacity x k x seq / experts)
        tokens of a row, first choices first (GShard, arXiv:2006.16668). None: every token of a row, so that nothing
        overflows, in memory for seq / (k seq / experts) times as many tokens as there are.
      imbalance: In place of `capacity`, the "dropless" dispatch: consecutive experts share a buffer, as those of one
        device do, which takes ceil(imbalance x k x seq / buffers) tokens of a row, for any of its experts. Only what
        exceeds that overflows. As many bytes travel as by a capacity of the same factor; experts compute blocks of
        their sorted tokens, with 5/4 of its FLOP at most, see `jaxpar.parallel.techniques.expert_slots`.
      buffers: Number of these buffers; it divides the experts, and the size of an axis `expert` divides it. Which
        choices overflow depends on it, and not on the mesh. 0 means the largest power of 2 up to 8 that divides them.
      counted: Whether a token counts; others (padding) are sent to no expert, and their result is 0. Shape
        [batch, seq], bool.

    Returns:
      (sums, of the shape and dtype of `x`; what became of the choices, see `Load`).

    Raises:
      JaxparError: If the shapes do not fit together, if a token has more choices than there are experts, if an
        expert has less than one slot, or if buffers would differ or be too small for an even load.
    """
    experts = _check(params, x, choices, weights, counted)
    if counted is not None:
        choices = jnp.where(counted[..., None], choices, experts)
    per_token, seq = weights.shape[-1], x.shape[1]
    if imbalance is None:
        sharing, slots = 1, _expert_capacity(capacity, per_token, seq, experts)
    else:
        sharing = _sharing(imbalance, buffers, capacity, experts)
        even = per_token * seq * sharing / experts
        slots = min(seq * min(per_token, sharing), math.ceil(round(imbalance * even, 6)))
    routing = Routing(choices=choices, weights=weights, experts=experts, capacity=slots, sharing=sharing)
    run = implementation("mixture", run_sequentially)
    return run(expert, params, x, routing)


def _expert_capacity(capacity: float | None, per_token: int, seq: int, experts: int) -> int:
    share = per_token * seq / experts  # tokens of a row for an expert, if all get as many
    if capacity is not None and not capacity * share >= 1:
        raise refuse(
            f"capacity={capacity} of {experts} experts: {capacity * share:.3g} tokens of a row for each",
            rule="an expert takes at least one token of a row: capacity x k x seq / experts",
            fix=f"capacity={1 / share:.3g} or more",
        )
    return seq if capacity is None else min(seq, math.ceil(round(capacity * share, 6)))


def _sharing(imbalance: float, buffers: int, capacity: float | None, experts: int) -> int:
    """Returns the number of experts that share a buffer."""
    count = buffers or math.gcd(experts, 8)
    if capacity is not None or not imbalance >= 1 or count < 1 or experts % count:
        more = "" if capacity is None else f", capacity={capacity}"
        raise refuse(
            f"imbalance={imbalance}, buffers={buffers}{more} of {experts} experts",
            rule="the dropless dispatch has no capacity: equal numbers of experts share buffers, which take an even "
            "load and more",
            fix=f"imbalance={max(imbalance, 1)}, buffers={nearest_divisor(experts, count) or 1}",
        )
    return experts // count


def run_sequentially(expert: Expert, params: Tree, x: jax.Array, routing: Routing) -> tuple[jax.Array, Load]:
    """Computes all tokens by each expert, in a loop, and adds up those that chose it."""
    slots = routing.slots()
    flat = x.reshape(-1, x.shape[-1])

    def add(total, number_and_params):
        number, of_expert = number_and_params
        weight = jnp.sum(jnp.where(slots.expert == number, routing.weights, 0), axis=-1, keepdims=True)
        y = expert(of_expert, flat).reshape(*x.shape[:-1], -1)
        return total + weight * y.astype(total.dtype), None

    dtype = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), routing.weights.dtype)
    total, _ = jax.lax.scan(add, jnp.zeros(x.shape, dtype), (jnp.arange(routing.experts), params))
    return total.astype(x.dtype), slots.load


def active_experts(expert: Expert, params: Tree, x: jax.Array, routing: Routing) -> tuple[jax.Array, Load]:
    """Has the FLOP of the choices alone, for a count that is only traced; its sums mean nothing."""
    count = math.ceil(routing.weights.size / routing.experts)
    y = jax.vmap(expert)(params, jnp.resize(x, (routing.experts, count, x.shape[-1])))
    return jnp.resize(y, x.shape).astype(x.dtype), routing.slots().load


def _check(params: Tree, x: jax.Array, choices: jax.Array, weights: jax.Array, counted: jax.Array | None) -> int:
    """Returns the number of experts."""
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(params)}
    rows = x.shape[:2]
    fits = (
        x.ndim == choices.ndim == weights.ndim == 3
        and choices.shape[:2] == weights.shape[:2] == rows
        and 1 <= weights.shape[2] <= choices.shape[2]
        and jnp.issubdtype(choices.dtype, jnp.integer)
        and (counted is None or counted.shape == rows)
    )
    if len(sizes) != 1 or not fits:
        shown = [
            f"{name} {a.dtype}{list(a.shape)}" for name, a in (("x", x), ("choices", choices), ("weights", weights))
        ]
        more = [f"counted {list(counted.shape)}"] if counted is not None else []
        raise refuse(
            f"jp.mixture({', '.join([*shown, *more])}) with parameters of {sorted(sizes)} experts",
            rule="x is [batch, seq, dim], choices whole numbers [batch, seq, k or more], weights [batch, seq, k], "
            "counted [batch, seq], and every parameter has the experts as dim 0",
            fix="weights, choices = jax.lax.top_k(jax.nn.softmax(router(x)), k)",
        )
    (experts,) = sizes
    if choices.shape[2] > experts:
        raise refuse(
            f"{choices.shape[2]} choices of {experts} experts",
            rule="a token chooses different experts",
            fix=f"k = {experts} or less",
        )
    return experts
