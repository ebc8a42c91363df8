"""The same GPT step by hand: raw JAX and optax, every sharding written where it is used.

What a careful engineer would write for one model and one mesh without jaxpar. It imports
nothing of jaxpar, so that the comparison in `overhead.py` is fair, start-up included.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, DIM, HEADS, HIDDEN, VOCAB, SEQ, BATCH = 4, 128, 4, 384, 256, 128, 32
ROWS = ("data", "fsdp")  # what the batch is split over


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    """Returns the mesh."""
    devices = np.array(jax.devices()).reshape(data, fsdp, tensor)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


# per parameter: shape, spec for tensor parallelism, dims fsdp takes (beside it, alone), scale of the initial numbers
_OUT = (2 * LAYERS) ** -0.5
PARAMETERS = {
    "embed": ((VOCAB, DIM), P("tensor", None), (1, 0), 1.0),
    "head": ((DIM, VOCAB), P(None, "tensor"), (0, 1), DIM**-0.5),
    "norm": ((DIM,), P(None), (0, 0), None),
    "attention_query": ((LAYERS, DIM, HEADS, DIM // HEADS), P(None, None, "tensor", None), (1, 1), DIM**-0.5),
    "attention_key": ((LAYERS, DIM, HEADS, DIM // HEADS), P(None, None, "tensor", None), (1, 1), DIM**-0.5),
    "attention_value": ((LAYERS, DIM, HEADS, DIM // HEADS), P(None, None, "tensor", None), (1, 1), DIM**-0.5),
    "attention_out": ((LAYERS, HEADS, DIM // HEADS, DIM), P(None, "tensor", None, None), (3, 3), DIM**-0.5 * _OUT),
    "mlp_up": ((LAYERS, DIM, HIDDEN), P(None, None, "tensor"), (1, 2), DIM**-0.5),
    "mlp_gate": ((LAYERS, DIM, HIDDEN), P(None, None, "tensor"), (1, 2), DIM**-0.5),
    "mlp_down": ((LAYERS, HIDDEN, DIM), P(None, "tensor", None), (2, 1), HIDDEN**-0.5 * _OUT),
    "norm_attention": ((LAYERS, DIM), P(None, None), (1, 1), None),
    "norm_mlp": ((LAYERS, DIM), P(None, None), (1, 1), None),
}
STACKED = (
    "attention_query",
    "attention_key",
    "attention_value",
    "attention_out",
    "mlp_up",
    "mlp_gate",
    "mlp_down",
    "norm_attention",
    "norm_mlp",
)


def nest(flat: dict) -> dict:
    """Returns the stacked parameters under `blocks`, beside the others."""
    blocks = {name: flat[name] for name in STACKED}
    return {"blocks": blocks, **{name: value for name, value in flat.items() if name not in STACKED}}


def stored_spec(name: str, mesh: Mesh) -> P:
    """Returns where a parameter lives: its tensor-parallel spec, with fsdp on the largest dim that is left."""
    _, spec, (beside, alone), _ = PARAMETERS[name]
    if mesh.shape["tensor"] == 1:
        return P(*["fsdp" if dim == alone else None for dim in range(len(spec))])
    return P(*["fsdp" if dim == beside else axis for dim, axis in enumerate(spec)])


def init(key) -> dict:
    """Returns the parameters."""
    keys = jax.random.split(key, len(PARAMETERS))
    made = {
        name: jnp.ones(shape) if scale is None else scale * jax.random.normal(k, shape)
        for k, (name, (shape, _, _, scale)) in zip(keys, PARAMETERS.items(), strict=True)
    }
    return nest(made)


def rms_norm(x, scale):
    """RMSNorm in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def rotary(x):
    """Rotary positions."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(value, used, stored):
    """Gathers a parameter; its gradient goes straight to where it is stored."""
    return jax.lax.with_sharding_constraint(value, used)


gather.defvjp(
    lambda value, used, stored: (jax.lax.with_sharding_constraint(value, used), None),
    lambda used, stored, _, gradient: (jax.lax.with_sharding_constraint(gradient, stored),),
)


@jax.custom_vjp
def swiglu(gate, up):
    """SwiGLU, whose backward pass keeps its two inputs."""
    return jax.nn.silu(gate) * up


def _swiglu_backward(kept, gradient):
    gate, up = kept
    zero, gradient = jax.lax.optimization_barrier((jnp.zeros((), gate.dtype), gradient))  # not the sigmoid from forward
    share = jax.nn.sigmoid(gate + zero)
    return gradient * up * share * (1 + gate * (1 - share)), gradient * gate * share


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


@jax.custom_vjp
def matmul(x, head):
    """The head, whose gradient is made as it is stored."""
    return jnp.einsum("bsd,dv->bsv", x, head)


def _matmul_backward(kept, gradient):
    x, head = kept
    return jnp.einsum("bsv,dv->bsd", gradient, head), jnp.einsum("bsd,bsv->dv", x, gradient)


matmul.defvjp(lambda x, head: (matmul(x, head), (x, head)), _matmul_backward)


@jax.custom_jvp
def cross_entropy(logits, targets):
    """Losses [batch, seq], whose backward pass keeps the logits and two numbers per token."""
    return _losses(logits, targets)[0]


def _losses(logits, targets):
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    total = jnp.sum(jnp.exp(logits - highest), axis=-1)
    picked = jnp.sum(jnp.where(_hit(logits, targets), logits, 0.0), axis=-1, keepdims=True)
    losses = jnp.log(total) - jnp.squeeze(picked - highest, axis=-1)
    # as ours: a target that is no token is no loss either
    return jnp.where(_known(targets), losses, jnp.nan), highest, total


def _hit(logits, targets):
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]


def _known(targets):
    return (targets >= 0) & (targets < VOCAB)


@cross_entropy.defjvp
def _cross_entropy_slope(primals, tangents):
    (logits, targets), (slopes, _) = primals, tangents
    losses, highest, total = _losses(logits, targets)
    slopes = jax.lax.optimization_barrier(slopes)

    @partial(jax.checkpoint, prevent_cse=False)
    def along(logits, highest, total, slopes):
        powers = jnp.exp(-(highest - logits))
        return jnp.sum(powers * slopes, axis=-1) / total - jnp.sum(
            jnp.where(_hit(logits, targets), slopes, 0.0), axis=-1
        )

    return losses, jnp.where(_known(targets), along(logits, highest, total, slopes), 0.0)


def forward(params, tokens, mesh):
    """Returns logits [batch, seq, vocab]."""

    def on(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def gathered(name, value):
        if mesh.shape["fsdp"] == 1:
            return value
        last = len(PARAMETERS[name][0]) - value.ndim
        used, stored = (NamedSharding(mesh, P(*spec[last:])) for spec in (PARAMETERS[name][1], stored_spec(name, mesh)))
        return on(value, *used.spec) if name == "embed" or mesh.shape["data"] == 1 else gather(value, used, stored)

    def layer(x, p):
        p = {name: gathered(name, value) for name, value in p.items()}
        y = rms_norm(x, p["norm_attention"])
        q = on(rotary(jnp.einsum("bsd,dhk->bshk", y, p["attention_query"])), ROWS, None, "tensor")
        k = on(rotary(jnp.einsum("bsd,dhk->bshk", y, p["attention_key"])), ROWS, None, "tensor")
        v = on(jnp.einsum("bsd,dhk->bshk", y, p["attention_value"]), ROWS, None, "tensor")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = on(x + jnp.einsum("bshk,hkd->bsd", y, p["attention_out"]), ROWS)
        y = rms_norm(x, p["norm_mlp"])
        up = on(jnp.einsum("bsd,df->bsf", y, p["mlp_up"]), ROWS, None, "tensor")
        gate = on(jnp.einsum("bsd,df->bsf", y, p["mlp_gate"]), ROWS, None, "tensor")
        return on(x + jnp.einsum("bsf,fd->bsd", swiglu(gate, up), p["mlp_down"]), ROWS), None

    x = on(jnp.take(gathered("embed", params["embed"]), tokens, axis=0), ROWS)
    x, _ = jax.lax.scan(layer, x, params["blocks"])
    x = rms_norm(x, gathered("norm", params["norm"]))
    return on(matmul(x, gathered("head", params["head"])), ROWS, None, "tensor")


def mean_loss(params, batch, mesh):
    """Returns the mean cross entropy."""
    logits = forward(params, batch["inputs"], mesh)
    return jnp.mean(cross_entropy(logits, batch["targets"]))


def build(mesh, optimizer):
    """Returns (state, step) with parameters born sharded."""
    placed = nest({name: NamedSharding(mesh, stored_spec(name, mesh)) for name in PARAMETERS})

    def make(key):
        params = init(key)
        return params, optimizer.init(params), jnp.zeros((), jnp.int32)

    shapes = jax.eval_shape(make, jax.random.key(0))
    state_specs = optax.tree.map_params(
        optimizer, lambda _, s: s, shapes[1], placed, transform_non_params=lambda _: NamedSharding(mesh, P())
    )
    everything = (placed, state_specs, NamedSharding(mesh, P()))
    state = jax.jit(make, out_shardings=everything)(jax.random.key(0))

    @partial(jax.jit, donate_argnums=0, out_shardings=(everything, None))
    def step(state, batch):
        params, inner, count = state
        loss, gradients = jax.value_and_grad(mean_loss)(params, batch, mesh)
        gradients = jax.tree.map(jax.lax.with_sharding_constraint, gradients, placed)
        updates, inner = optimizer.update(gradients, inner, params)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(gradients),
            "tokens": jnp.float32(math.prod(batch["targets"].shape)),
        }
        return (optax.apply_updates(params, updates), inner, count + 1), metrics

    return state, step


def make_optimizer():
    """Returns the optax chain of both sides."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95))


def make_batch(mesh):
    """Returns a batch on its devices."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
    place = NamedSharding(mesh, P(ROWS))
    return {"inputs": jax.device_put(tokens[:, :-1], place), "targets": jax.device_put(tokens[:, 1:], place)}


if __name__ == "__main__":  # one first step, for the time from the start of the process to its end
    import sys

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    chosen = make_mesh(*map(int, sys.argv[1:4]))
    begin, run = build(chosen, make_optimizer())
    jax.block_until_ready(run(begin, make_batch(chosen)))
    print("first step", flush=True)
