"""The expert twin: a Llama training step as the best practitioner writes it, in raw JAX and optax.

It uses nothing of jaxpar and follows none of its choices: it is what jaxpar is measured against, and is changed only to
become faster. What it does by hand:

    whole step    one `shard_map` over (data, fsdp, tensor); every collective below is written out
    matrices      q, k and v are one matmul, gate and up another; rows over `fsdp`, columns over `tensor`
    fsdp          matrices are gathered where they are used; gradients come back by reduce-scatter, then are summed over
                  `data` as shards. Norm scales stay whole
    tensor        two sums per layer forward, two backward. The table of tokens is split by columns: a gather of what
                  was looked up, and nothing backward. The logits are split over the vocabulary, and the loss of the
                  parts is one gather of two numbers per token
    own backward  the head and the loss are one, keep logits and their logsumexp, and write the gradient of the logits
                  over them; the norm keeps its input and one number per token; SwiGLU its two inputs
    small things  gradients of norm scales and the loss travel in one sum; the norm of all gradients is another

Suffixes of arrays: b batch, s queries, t keys, d embed, h heads, k head_dim, f mlp, v vocab, n layers.
"""

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

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
Params = dict[str, jax.Array]
Metrics = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """Shape of the model, and how its step is run.

    Attributes:
      vocab: Tokens there are.
      seq: Tokens of a sequence.
      layers: Blocks.
      dim: Width of the stream.
      heads: Attention heads.
      hidden: Width of the feed-forward.
      remat: Whether the backward pass keeps only the input of each layer.
      unrolled: One copy of the layer per layer, instead of a scan.
      dtype: What matmuls read; parameters and their gradients' sums are float32.
      attention: XLA's own, or the kernel of cuDNN (bfloat16, on a GPU).
    """

    vocab: int = 8192
    seq: int = 256
    layers: int = 4
    dim: int = 256
    heads: int = 4
    hidden: int = 1024
    remat: bool = False
    unrolled: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["xla", "cudnn"] = "xla"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the parameters."""
        n, d, h, f = self.layers, self.dim, self.heads, self.hidden
        return {
            "table": (self.vocab, d),
            "qkv": (n, d, 3, h, d // h),
            "out": (n, h, d // h, d),
            "gate_up": (n, d, 2, f),
            "down": (n, f, d),
            "norms": (2 * n + 1, d),
            "head": (d, self.vocab),
        }


SPECS = {
    "table": P("fsdp", "tensor"),
    "qkv": P(None, "fsdp", None, "tensor", None),
    "out": P(None, "tensor", None, "fsdp"),
    "gate_up": P(None, "fsdp", None, "tensor"),
    "down": P(None, "tensor", "fsdp"),
    "norms": P(),
    "head": P("fsdp", "tensor"),
}
GATHERED = {"table": 0, "qkv": 0, "out": 2, "gate_up": 0, "down": 1, "head": 0}  # the dim over `fsdp`, of one layer
EPS = 1e-5
ROPE_BASE = 10_000.0


def make_mesh(devices: Any, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """Returns devices as (data, fsdp, tensor)."""
    return Mesh(np.asarray(devices).reshape(data, fsdp, tensor), AXES)


def init(model: Llama, key: jax.Array) -> Params:
    """Returns normally distributed parameters, float32; norm scales are ones."""
    found = {}
    for i, (name, shape) in enumerate(model.shapes().items()):
        fan_in = {"table": 1, "norms": 1, "out": model.dim, "down": model.hidden}.get(name, model.dim)
        scale = fan_in**-0.5 * ((2 * model.layers) ** -0.5 if name in ("out", "down") else 1.0)
        found[name] = scale * jax.random.normal(jax.random.fold_in(key, i), shape)
    return found | {"norms": jnp.ones(model.shapes()["norms"])}


def shardings(model: Llama, optimizer: optax.GradientTransformation, mesh: Mesh) -> tuple[Any, Any]:
    """Returns the shardings of (parameters, optimizer state)."""
    params = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return params, jax.tree.map(partial(NamedSharding, mesh), _moments_spec(optimizer, model))


def build(
    model: Llama, optimizer: optax.GradientTransformation, mesh: Mesh, *, clip: float = 1.0
) -> Callable[[tuple[Params, Any], jax.Array, jax.Array], tuple[tuple[Params, Any], Metrics]]:
    """Returns the step, jitted: ((parameters, optimizer state), tokens, targets) to (the same, (mean loss, norm)).

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
        loss, grads = jax.value_and_grad(partial(_loss, model))(params, tokens_bs, targets_bs)
        loss, grads = _summed(loss, grads, mesh)
        norm = _grad_norm(grads, mesh)
        scale = jnp.minimum(1.0, clip / norm)
        updates, moments = optimizer.update({name: scale * x for name, x in grads.items()}, moments, params)
        return (optax.apply_updates(params, updates), moments), (loss, norm)

    by_hand = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(state_spec, P(BATCH), P(BATCH)),
        out_specs=(state_spec, P()),
        check_vma=False,  # sums over `tensor` are written out below, forward and backward
    )
    return jax.jit(by_hand, donate_argnums=0)


def _moments_spec(optimizer: optax.GradientTransformation, model: Llama) -> Any:
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in model.shapes().items()}
    moments = jax.eval_shape(optimizer.init, like)
    return optax.tree.map_params(optimizer, lambda _, spec: spec, moments, SPECS, transform_non_params=lambda _: P())


def _summed(loss: jax.Array, grads: Params, mesh: Mesh) -> tuple[jax.Array, Params]:
    # shards of matrices over `data`; what is whole, and the loss, over all that the batch is split over, in one sum
    norms = grads.pop("norms")
    small = jax.lax.psum(jnp.append(norms, loss), BATCH)
    if mesh.shape["data"] > 1:
        grads = jax.lax.psum(grads, "data")
    return small[-1], grads | {"norms": small[:-1].reshape(norms.shape)}


def _grad_norm(grads: Params, mesh: Mesh) -> jax.Array:
    split = sum(jnp.sum(jnp.square(x)) for name, x in grads.items() if name != "norms")
    if mesh.shape["fsdp"] * mesh.shape["tensor"] > 1:
        split = jax.lax.psum(split, ("fsdp", "tensor"))
    return jnp.sqrt(split + jnp.sum(jnp.square(grads["norms"])))


def _loss(model: Llama, params: Params, tokens_bs: jax.Array, targets_bs: jax.Array) -> jax.Array:
    """Returns this device's share of the mean loss."""
    dtype = jnp.dtype(model.dtype)
    whole = {name: partial(_gathered, dim=dim, dtype=dtype) for name, dim in GATHERED.items()}
    norms = params["norms"]
    tables = _rope(model)

    def layer(x_bsd, own):
        norms, qkv, out, gate_up, down = own
        y = _enter_tensor(_norm(x_bsd, norms[0]))
        qkv_bschk = jnp.einsum("bsd,dchk->bschk", y, whole["qkv"](qkv))
        y_bshk = _attend(model, qkv_bschk, tables)
        x_bsd = x_bsd + _leave_tensor(jnp.einsum("bshk,hkd->bsd", y_bshk, whole["out"](out)))
        y = _enter_tensor(_norm(x_bsd, norms[1]))
        h_bsf = _swiglu(jnp.einsum("bsd,dcf->bscf", y, whole["gate_up"](gate_up)))
        return x_bsd + _leave_tensor(jnp.einsum("bsf,fd->bsd", h_bsf, whole["down"](down))), None

    if model.remat:
        layer = jax.checkpoint(layer, prevent_cse=model.unrolled)
    layers = (
        norms[:-1].reshape(model.layers, 2, model.dim), params["qkv"], params["out"], params["gate_up"], params["down"]
    )  # fmt: skip

    x_bsd = _columns(jnp.take(whole["table"](params["table"]), tokens_bs, axis=0, mode="clip"))
    if model.unrolled:
        for i in range(model.layers):
            x_bsd, _ = layer(x_bsd, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
    else:
        x_bsd, _ = jax.lax.scan(layer, x_bsd, layers)
    y = _enter_tensor(_norm(x_bsd, norms[-1]))
    return _head(y, whole["head"](params["head"]), targets_bs) / _over(targets_bs.size, BATCH)


def _over(size: int, axes: tuple[str, ...]) -> int:
    return size * int(np.prod([jax.lax.axis_size(axis) for axis in axes]))


# collectives, with their backward pass


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(shard: jax.Array, dim: int, dtype: Any) -> jax.Array:
    # the matrix whole over `fsdp`, in the dtype of the matmul; its gradient is summed in float32, and split
    shard = shard.astype(dtype)
    return shard if jax.lax.axis_size("fsdp") == 1 else jax.lax.all_gather(shard, "fsdp", axis=dim, tiled=True)


def _scattered(dim: int, dtype: Any, _, grad: jax.Array) -> tuple[jax.Array]:
    grad = grad.astype(jnp.float32)
    if jax.lax.axis_size("fsdp") > 1:
        grad = jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=dim, tiled=True)
    return (grad,)


_gathered.defvjp(lambda shard, dim, dtype: (_gathered(shard, dim, dtype), None), _scattered)


def _sum_over_tensor(x: jax.Array) -> jax.Array:
    return x if jax.lax.axis_size("tensor") == 1 else jax.lax.psum(x, "tensor")


@jax.custom_vjp
def _enter_tensor(x: jax.Array) -> jax.Array:
    # before matrices split by columns: nothing forward, a sum backward
    return x


_enter_tensor.defvjp(lambda x: (x, None), lambda _, grad: (_sum_over_tensor(grad),))


@jax.custom_vjp
def _leave_tensor(x: jax.Array) -> jax.Array:
    # after matrices split by rows: a sum forward, nothing backward
    return _sum_over_tensor(x)


_leave_tensor.defvjp(lambda x: (_sum_over_tensor(x), None), lambda _, grad: (grad,))


@jax.custom_vjp
def _columns(x: jax.Array) -> jax.Array:
    # last dim, split over `tensor`, made whole: a gather forward, the own part backward
    return x if jax.lax.axis_size("tensor") == 1 else jax.lax.all_gather(x, "tensor", axis=x.ndim - 1, tiled=True)


def _own_columns(_, grad: jax.Array) -> tuple[jax.Array]:
    width = grad.shape[-1] // jax.lax.axis_size("tensor")
    return (jax.lax.dynamic_slice_in_dim(grad, jax.lax.axis_index("tensor") * width, width, axis=-1),)


_columns.defvjp(lambda x: (_columns(x), None), _own_columns)


# layers, with their backward pass


@jax.custom_vjp
def _norm(x_bsd: jax.Array, scale_d: jax.Array) -> jax.Array:
    return _norm_forward(x_bsd, scale_d)[0]


def _norm_forward(x_bsd: jax.Array, scale_d: jax.Array):
    x = x_bsd.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPS)
    return (x * r * scale_d).astype(x_bsd.dtype), (x_bsd, r, scale_d)


def _norm_backward(kept, grad_bsd: jax.Array):
    x_bsd, r, scale_d = kept
    y, grad = x_bsd.astype(jnp.float32) * r, grad_bsd.astype(jnp.float32)
    scaled = grad * scale_d
    grad_x = r * (scaled - y * jnp.mean(scaled * y, axis=-1, keepdims=True))
    return grad_x.astype(x_bsd.dtype), jnp.sum(grad * y, axis=(0, 1))


_norm.defvjp(_norm_forward, _norm_backward)


@jax.custom_vjp
def _swiglu(both_bscf: jax.Array) -> jax.Array:
    gate, up = both_bscf[:, :, 0], both_bscf[:, :, 1]
    return jax.nn.silu(gate) * up


def _swiglu_backward(both_bscf: jax.Array, grad_bsf: jax.Array) -> tuple[jax.Array]:
    gate, up = both_bscf[:, :, 0], both_bscf[:, :, 1]
    share = jax.nn.sigmoid(gate)
    grad_gate = grad_bsf * up * share * (1 + gate * (1 - share))
    return (jnp.stack([grad_gate, grad_bsf * gate * share], axis=2),)


_swiglu.defvjp(lambda both_bscf: (_swiglu(both_bscf), both_bscf), _swiglu_backward)


def _rope(model: Llama) -> tuple[jax.Array, jax.Array]:
    pairs = model.dim // model.heads // 2
    angle = np.arange(model.seq)[:, None] * ROPE_BASE ** (-np.arange(pairs, dtype=np.float32) / pairs)
    angle = np.asarray(angle, np.float32)[:, None, :]
    return jnp.asarray(np.cos(angle)), jnp.asarray(np.sin(angle))


def _attend(model: Llama, qkv_bschk: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = tables
    qk, v = qkv_bschk[:, :, :2], qkv_bschk[:, :, 2]
    a, b = jnp.split(qk.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(v.dtype)
    q, k = turned[:, :, 0], turned[:, :, 1]
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=model.attention)


@jax.custom_vjp
def _head(y_bsd: jax.Array, head_dv: jax.Array, targets_bs: jax.Array) -> jax.Array:
    # the sum of the cross entropies of this device's tokens, over all parts of the vocabulary
    return _head_forward(y_bsd, head_dv, targets_bs)[0]


def _head_forward(y_bsd: jax.Array, head_dv: jax.Array, targets_bs: jax.Array):
    y_td = y_bsd.reshape(-1, y_bsd.shape[-1])
    logits_tv = y_td @ head_dv
    logits = logits_tv.astype(jnp.float32)
    # targets as numbers of this device's part of the vocabulary; outside of it where another device has them
    own = targets_bs.reshape(-1) - jax.lax.axis_index("tensor") * logits.shape[-1]
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, own[:, None], axis=-1, mode="clip")[:, 0]
    if jax.lax.axis_size("tensor") > 1:
        picked = jnp.where((own >= 0) & (own < logits.shape[-1]), picked, 0.0)
        parts = jax.lax.all_gather(jnp.stack([lse, picked]), "tensor")
        lse, picked = jax.nn.logsumexp(parts[:, 0], axis=0), jnp.sum(parts[:, 1], axis=0)
    return jnp.sum(lse - picked), (y_bsd, head_dv, logits_tv, lse, own)


def _head_backward(kept, grad: jax.Array):
    y_bsd, head_dv, logits_tv, lse, own = kept
    found = jnp.arange(logits_tv.shape[-1]) == own[:, None]
    share = jnp.exp(logits_tv.astype(jnp.float32) - lse[:, None])
    # computed once, in place of the logits: without the barrier each matmul computes its own
    grad_tv = jax.lax.optimization_barrier((grad * (share - found)).astype(logits_tv.dtype))
    y_td = y_bsd.reshape(-1, y_bsd.shape[-1])
    return (grad_tv @ head_dv.T).reshape(y_bsd.shape), y_td.T @ grad_tv, None


_head.defvjp(_head_forward, _head_backward)
