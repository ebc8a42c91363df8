"""The mixture twin: a training step of a decoder with experts, by hand in raw JAX and optax.

It uses nothing of jaxpar and follows none of its choices. It is frozen: `test_mixture_twin.py` has its hash.

    whole step     one `shard_map` over (data, expert); JAX differentiates its collectives
    expert         splits the batch, the experts, and one dim of every other parameter, which is gathered in 16 bits
                   where a layer uses it. Slots of tokens travel to their experts and back by two all-to-alls
    data           replicas: sums of gradients, in 16 bits
    router         gathered in 16 bits, like all weights. Scores, choices, losses and the sum of its gradient are in
                   float32; losses are of each row alone
    slots          the first `capacity` choices of an expert in a row, first choices of all tokens first; the rest is
                   dropped. Slots and sums of slots are gathers, and so are their gradients
    own backward   the head and the loss are one, and save logits and their logsumexp. The norm saves its input and one
                   number per token, the router its input in 16 bits, SwiGLU its two inputs, a sum of slots its terms
    metrics        all in one sum over the devices; the norm of all gradients is another

Suffixes of arrays: b batch, s tokens, k choices, n slots of a row, t tokens of an expert, d embed, h heads, f mlp,
e experts, v vocab, l layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "expert")
Params = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
EPS = 1e-5
ROPE_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shape of the model.

    Attributes:
      vocab: Tokens there are.
      seq: Tokens of a sequence.
      layers: Blocks, each with a mixture.
      dim: Width of the stream.
      heads: Attention heads.
      experts: Experts of a layer.
      hidden: Width of an expert.
      per_token: Experts that compute a token.
      capacity: Tokens of a row that an expert takes, over the mean.
      balance: Weight of the balance loss (Switch Transformers, arXiv:2101.03961), of each row.
      dtype: Dtype of matmuls; parameters and the optimizer's state are float32.
    """

    vocab: int = 4096
    seq: int = 256
    layers: int = 4
    dim: int = 512
    heads: int = 4
    experts: int = 16
    hidden: int = 512
    per_token: int = 2
    capacity: float = 1.25
    balance: float = 0.01
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    @property
    def slots(self) -> int:
        """Slots of an expert for the tokens of a row."""
        return min(self.seq, math.ceil(round(self.capacity * self.per_token * self.seq / self.experts, 6)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parameters."""
        layers, d, h, e, f = self.layers, self.dim, self.heads, self.experts, self.hidden
        return {
            "table": (self.vocab, d),
            "qkv": (layers, d, 3, h, d // h),
            "out": (layers, h * (d // h), d),
            "router": (layers, d, e),
            "gate_up": (layers, e, d, 2, f),
            "down": (layers, e, f, d),
            "norms": (2 * layers + 1, d),
            "head": (d, self.vocab),
        }


SPECS = {
    "table": P("expert"),
    "qkv": P(None, "expert"),
    "out": P(None, "expert"),
    "router": P(None, "expert"),
    "gate_up": P(None, "expert"),
    "down": P(None, "expert"),
    "norms": P(None, "expert"),
    "head": P("expert"),
}


def make_mesh(devices: Any, data: int = 1, expert: int = 1) -> Mesh:
    """Returns devices as (data, expert)."""
    return Mesh(np.asarray(devices).reshape(data, expert), AXES)


def shardings(model: Mixture, optimizer: optax.GradientTransformation, mesh: Mesh) -> tuple[Any, Any]:
    """Returns the shardings of (parameters, optimizer state)."""
    return jax.tree.map(partial(NamedSharding, mesh), (SPECS, _moments_spec(optimizer, model)))


def build(
    model: Mixture, optimizer: optax.GradientTransformation, mesh: Mesh, *, clip: float = 1.0
) -> Callable[[tuple[Params, Any], jax.Array, jax.Array], tuple[tuple[Params, Any], Metrics]]:
    """Returns the step, jitted: ((parameters, optimizer state), tokens, targets) to (the same, metrics).

    Args:
      model: Its shape.
      optimizer: Elementwise: it sees the shard of each device alone, after clipping.
      mesh: Of `make_mesh`.
      clip: Gradients whose norm is above are scaled down to it, all together.

    Returns:
      A function whose first argument is donated. Tokens and targets: shape [batch, seq], int32.
    """
    state_spec = (SPECS, _moments_spec(optimizer, model))

    def step(state, tokens_bs, targets_bs):
        params, moments = state
        params16 = {name: x if name == "router" else x.astype(model.dtype) for name, x in params.items()}
        (_, sums), grads = jax.value_and_grad(partial(_loss, model), has_aux=True)(params16, tokens_bs, targets_bs)
        if mesh.shape["data"] > 1:
            grads = jax.lax.psum(grads, "data")
        grads = {name: x.astype(jnp.float32) for name, x in grads.items()}
        norm = jnp.sqrt(jax.lax.psum(sum(jnp.sum(jnp.square(x)) for x in grads.values()), "expert"))
        scale = jnp.minimum(1.0, clip / norm)
        updates, moments = optimizer.update({name: scale * x for name, x in grads.items()}, moments, params)
        metrics = _metrics(model, sums, tokens_bs.size * mesh.size)
        return (optax.apply_updates(params, updates), moments), metrics | {"grad_norm": norm}

    sharded_step = jax.shard_map(
        step, mesh=mesh, in_specs=(state_spec, P(AXES), P(AXES)), out_specs=(state_spec, P()), check_vma=False
    )
    return jax.jit(sharded_step, donate_argnums=0)


def _moments_spec(optimizer: optax.GradientTransformation, model: Mixture) -> Any:
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in model.shapes().items()}
    moments = jax.eval_shape(optimizer.init, like)
    return optax.tree.map_params(optimizer, lambda _, spec: spec, moments, SPECS, transform_non_params=lambda _: P())


def _metrics(model: Mixture, sums: tuple[jax.Array, ...], tokens: int) -> Metrics:
    entropy, losses, lost, load_le = sums
    flat = jax.lax.psum(jnp.concatenate([jnp.stack([entropy, *losses, lost]), load_le.reshape(-1)]), AXES)
    entropy, balance, z, lost = flat[:4]
    load_le = flat[4:].reshape(load_le.shape)
    entropy, balance, z = entropy / tokens, balance * model.seq / tokens, z * model.seq / tokens
    return {
        "loss": entropy + model.balance * balance,
        "cross_entropy": entropy,
        "balance": balance,
        "router_z": z,
        "dropped": lost / jnp.sum(load_le),
        "load_max": jnp.sum(jnp.max(load_le, axis=1)) / jnp.sum(jnp.mean(load_le, axis=1)),
    }


def _loss(model: Mixture, params: Params, tokens_bs: jax.Array, targets_bs: jax.Array):
    """Returns this device's share of the loss, and its sums for the metrics."""
    norms = _gathered(params["norms"], 1)
    tables = _rope(model)

    def layer(x_bsd, weights):
        norms, qkv, out, router, gate_up, down = weights
        qkv_bschk = jnp.einsum("bsd,dchk->bschk", _norm(x_bsd, norms[0]), _gathered(qkv))
        y_bsd = _attend(qkv_bschk, tables).reshape(x_bsd.shape)
        x_bsd = x_bsd + y_bsd @ _gathered(out)
        y_bsd, sums = _mixture(model, _norm(x_bsd, norms[1]), router, gate_up, down)
        return x_bsd + y_bsd, sums

    layers = (
        norms[:-1].reshape(model.layers, 2, model.dim),
        *(params[name] for name in ("qkv", "out", "router", "gate_up", "down")),
    )
    x_bsd = jnp.take(_gathered(params["table"]), tokens_bs, axis=0, mode="clip")
    x_bsd, (losses, lost, load_le) = jax.lax.scan(layer, x_bsd, layers)
    entropy = _head(_norm(x_bsd, norms[-1]), _gathered(params["head"]), targets_bs)
    losses = jnp.sum(losses, axis=0) / model.layers
    devices = jax.lax.axis_size("data") * jax.lax.axis_size("expert")
    loss = (entropy + model.balance * model.seq * losses[0]) / (targets_bs.size * devices)
    return loss, (entropy, losses, jnp.sum(lost), load_le)


def _gathered(shard: jax.Array, dim: int = 0) -> jax.Array:
    # JAX's gradient of it is a reduce-scatter
    return shard if jax.lax.axis_size("expert") == 1 else jax.lax.all_gather(shard, "expert", axis=dim, tiled=True)


# the mixture


def _mixture(model: Mixture, x_bsd: jax.Array, router_de: jax.Array, gate_up: jax.Array, down: jax.Array):
    """Returns weighted sums of what the experts compute, and sums of their losses and loads."""
    logits_bse = _route(x_bsd, router_de)
    scores_bse = jax.nn.softmax(logits_bse)
    weights_bsk, choices_bsk = jax.lax.top_k(scores_bse, model.per_token)
    weights_bsk = weights_bsk / jnp.sum(weights_bsk, axis=-1, keepdims=True)
    slot_bks, choice_bn, load_be = _slots(model, choices_bsk)

    slots_bnd = _dispatch(x_bsd, slot_bks, choice_bn)
    h_etd = _to_experts(model, slots_bnd)
    y_etd = jnp.einsum("etf,efd->etd", _swiglu(jnp.einsum("etd,edcf->etcf", h_etd, gate_up)), down)
    outputs_bnd = _to_rows(model, y_etd)
    y_bsd = _combine(outputs_bnd, weights_bsk, slot_bks, choice_bn)

    shares_be = load_be / (model.per_token * model.seq)
    balance = model.experts * jnp.sum(shares_be * jnp.mean(scores_bse, axis=1))
    z = jnp.sum(jnp.mean(jnp.square(jax.nn.logsumexp(logits_bse, axis=-1)), axis=1))
    lost = jnp.sum(slot_bks == model.experts * model.slots, dtype=jnp.float32)
    return y_bsd, (jnp.stack([balance, z]), lost, jnp.sum(load_be, axis=0))


@jax.custom_vjp
def _route(x_bsd: jax.Array, router_de: jax.Array) -> jax.Array:
    return _route_forward(x_bsd, router_de)[0]


def _route_forward(x_bsd: jax.Array, router_de: jax.Array):
    router_de = _gathered(router_de.astype(x_bsd.dtype))
    wide = x_bsd.astype(jnp.float32), router_de.astype(jnp.float32)
    return jnp.einsum("bsd,de->bse", *wide), (x_bsd, router_de)


def _route_backward(residuals, grad_bse: jax.Array):
    x_bsd, router_de = residuals
    grad_x = jnp.einsum("bse,de->bsd", grad_bse, router_de.astype(jnp.float32)).astype(x_bsd.dtype)
    grad_de = jnp.einsum("bsd,bse->de", x_bsd.astype(jnp.float32), grad_bse)
    if jax.lax.axis_size("expert") > 1:
        grad_de = jax.lax.psum_scatter(grad_de, "expert", scatter_dimension=0, tiled=True)
    return grad_x, grad_de


_route.defvjp(_route_forward, _route_backward)


def _slots(model: Mixture, choices_bsk: jax.Array):
    """Returns the slot of each choice, the choice in each slot, and the choices of each expert.

    A choice without a slot, and a slot without a choice, have the number after the last.
    """
    rows, end = choices_bsk.shape[0], model.experts * model.slots
    requests = choices_bsk.transpose(0, 2, 1).reshape(rows, -1)  # first choices of all tokens first
    hits = requests[..., None] == jnp.arange(model.experts)
    counts = jnp.cumsum(hits, axis=1, dtype=jnp.int32)
    position = jnp.sum(jnp.where(hits, counts - 1, 0), axis=-1)
    slot = jnp.where(position < model.slots, requests * model.slots + position, end)
    empty = jnp.full((rows, end), requests.shape[1], jnp.int32)
    choice = empty.at[jnp.arange(rows)[:, None], slot].set(jnp.arange(requests.shape[1], dtype=jnp.int32), mode="drop")
    return slot.reshape(rows, model.per_token, -1), choice, counts[:, -1].astype(jnp.float32)


def _take(x_bnd: jax.Array, index: jax.Array) -> jax.Array:
    """Takes entries of dim 1 of each row; zeros where there is none."""
    return jax.vmap(lambda x, index: jnp.take(x, index, axis=0, mode="fill", fill_value=0))(x_bnd, index)


def _tokens(slot_bks: jax.Array, choice_bn: jax.Array) -> jax.Array:
    """Returns the token in each slot; the number after the last where a slot is empty."""
    tokens = slot_bks.shape[2]
    return jnp.where(choice_bn == slot_bks.shape[1] * tokens, tokens, choice_bn % tokens)


@jax.custom_vjp
def _dispatch(x_bsd: jax.Array, slot_bks: jax.Array, choice_bn: jax.Array) -> jax.Array:
    return _take(x_bsd, _tokens(slot_bks, choice_bn))


def _dispatch_backward(slot_bks: jax.Array, grad_bnd: jax.Array):
    grad_bsd = jnp.sum(_take(grad_bnd, slot_bks), axis=1, dtype=jnp.float32)
    return grad_bsd.astype(grad_bnd.dtype), None, None


_dispatch.defvjp(lambda x, slot, choice: (_dispatch(x, slot, choice), slot), _dispatch_backward)


@jax.custom_vjp
def _combine(y_bnd: jax.Array, weights_bsk: jax.Array, slot_bks: jax.Array, choice_bn: jax.Array) -> jax.Array:
    return _combine_forward(y_bnd, weights_bsk, slot_bks, choice_bn)[0]


def _combine_forward(y_bnd: jax.Array, weights_bsk: jax.Array, slot_bks: jax.Array, choice_bn: jax.Array):
    parts_bksd, weights_bks = _take(y_bnd, slot_bks), weights_bsk.transpose(0, 2, 1)
    y_bsd = jnp.sum(weights_bks[..., None] * parts_bksd, axis=1).astype(y_bnd.dtype)
    return y_bsd, (parts_bksd, weights_bks, slot_bks, choice_bn)


def _combine_backward(residuals, grad_bsd: jax.Array):
    parts_bksd, weights_bks, slot_bks, choice_bn = residuals
    weights_bn = _take(weights_bks.reshape(len(choice_bn), -1), choice_bn)
    grad_bnd = (weights_bn[..., None] * _take(grad_bsd, _tokens(slot_bks, choice_bn))).astype(grad_bsd.dtype)
    grad_bsk = jnp.einsum("bksd,bsd->bsk", parts_bksd, grad_bsd, preferred_element_type=jnp.float32)
    return grad_bnd, grad_bsk, None, None


_combine.defvjp(_combine_forward, _combine_backward)


def _to_experts(model: Mixture, x_bnd: jax.Array) -> jax.Array:
    """Sends the slots [rows, experts x slots, dim] of this device's rows, and gets those of its experts."""
    ways = jax.lax.axis_size("expert")
    x = x_bnd.reshape(-1, ways, model.experts // ways, model.slots, model.dim).transpose(1, 2, 0, 3, 4)
    x = jax.lax.all_to_all(x, "expert", split_axis=0, concat_axis=0)
    return x.transpose(1, 0, 2, 3, 4).reshape(model.experts // ways, -1, model.dim)


def _to_rows(model: Mixture, y_etd: jax.Array) -> jax.Array:
    """The inverse of `_to_experts`."""
    ways = jax.lax.axis_size("expert")
    y = y_etd.reshape(model.experts // ways, ways, -1, model.slots, model.dim).transpose(1, 0, 2, 3, 4)
    y = jax.lax.all_to_all(y, "expert", split_axis=0, concat_axis=0)
    return y.transpose(2, 0, 1, 3, 4).reshape(-1, model.experts * model.slots, model.dim)


# layers, with their backward pass


@jax.custom_vjp
def _norm(x_bsd: jax.Array, scale_d: jax.Array) -> jax.Array:
    return _norm_forward(x_bsd, scale_d)[0]


def _norm_forward(x_bsd: jax.Array, scale_d: jax.Array):
    x = x_bsd.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPS)
    return (x * r).astype(x_bsd.dtype) * scale_d, (x_bsd, r, scale_d)


def _norm_backward(residuals, grad_bsd: jax.Array):
    x_bsd, r, scale_d = residuals
    y, grad = x_bsd.astype(jnp.float32) * r, grad_bsd.astype(jnp.float32)
    scaled = grad * scale_d
    grad_x = r * (scaled - y * jnp.mean(scaled * y, axis=-1, keepdims=True))
    return grad_x.astype(x_bsd.dtype), jnp.sum(grad * y, axis=(0, 1)).astype(scale_d.dtype)


_norm.defvjp(_norm_forward, _norm_backward)


@jax.custom_vjp
def _swiglu(both_etcf: jax.Array) -> jax.Array:
    gate, up = both_etcf[:, :, 0], both_etcf[:, :, 1]
    return jax.nn.silu(gate) * up


def _swiglu_backward(both_etcf: jax.Array, grad_etf: jax.Array) -> tuple[jax.Array]:
    gate, up = both_etcf[:, :, 0], both_etcf[:, :, 1]
    share = jax.nn.sigmoid(gate)
    grad_gate = grad_etf * up * share * (1 + gate * (1 - share))
    return (jnp.stack([grad_gate, grad_etf * gate * share], axis=2),)


_swiglu.defvjp(lambda both: (_swiglu(both), both), _swiglu_backward)


def _rope(model: Mixture) -> tuple[jax.Array, jax.Array]:
    pairs = model.dim // model.heads // 2
    angle = np.arange(model.seq)[:, None] * ROPE_BASE ** (-np.arange(pairs, dtype=np.float32) / pairs)
    angle = np.asarray(angle, np.float32)[:, None, None, :]
    return jnp.asarray(np.cos(angle)), jnp.asarray(np.sin(angle))


def _attend(qkv_bschk: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = tables
    qk, v = qkv_bschk[:, :, :2], qkv_bschk[:, :, 2]
    a, b = jnp.split(qk.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(v.dtype)
    return jax.nn.dot_product_attention(rotated[:, :, 0], rotated[:, :, 1], v, is_causal=True)


@jax.custom_vjp
def _head(y_bsd: jax.Array, head_dv: jax.Array, targets_bs: jax.Array) -> jax.Array:
    # the sum of the cross entropies of this device's tokens
    return _head_forward(y_bsd, head_dv, targets_bs)[0]


def _head_forward(y_bsd: jax.Array, head_dv: jax.Array, targets_bs: jax.Array):
    logits_tv = y_bsd.reshape(-1, y_bsd.shape[-1]) @ head_dv
    logits, targets = logits_tv.astype(jnp.float32), targets_bs.reshape(-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1, mode="clip")[:, 0]
    return jnp.sum(lse - picked), (y_bsd, head_dv, logits_tv, lse, targets)


def _head_backward(residuals, grad: jax.Array):
    y_bsd, head_dv, logits_tv, lse, targets = residuals
    hit = jnp.arange(logits_tv.shape[-1]) == targets[:, None]
    share = jnp.exp(logits_tv.astype(jnp.float32) - lse[:, None])
    # computed once, in place of the logits: without the barrier each matmul computes its own
    grad_tv = jax.lax.optimization_barrier((grad * (share - hit)).astype(logits_tv.dtype))
    y_td = y_bsd.reshape(-1, y_bsd.shape[-1])
    return (grad_tv @ head_dv.T).reshape(y_bsd.shape), y_td.T @ grad_tv, None


_head.defvjp(_head_forward, _head_backward)
