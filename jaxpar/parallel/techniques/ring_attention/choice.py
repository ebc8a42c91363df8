"""Chooses the implementation of a device's part of attention, and its sharding: cuDNN's kernel, or blocks of plain JAX.

    cuDNN's kernel    on GPUs, in 16 bits: supported heads, no segments or softcap, a window only in one group
    plain JAX         else, and always on simulated devices; on absent GPUs, unless the kernel is requested

For absent GPUs XLA compiles the kernel's calls without cuDNN, so their workspace memory, FLOP and time are unknown.
Each device runs its part on local arrays in `shard_map`, if axes split examples and heads evenly, and heads of keys are
split like heads of queries, because XLA cannot partition a kernel and would gather all its arguments. A note names the
implementation that runs.

The fused kernel is checked on the local device before a step uses it for parts of attention. If the kernel defined
logsumexp differently, or its gradients ignored the final statistics, training would silently go wrong. So once
per process, dtype and kind of heads, jaxpar computes a small attention over two parts of the keys, as a ring does, and
compares values and gradients with blockwise attention in plain JAX and float32.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.errors import refuse
from jaxpar.models.blocks.attention import blockwise
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.fused import CUDNN, FusedKernel, capability, kernel_override, merge
from jaxpar.models.dim_names import get_spec, spec_axes
from jaxpar.models.islands import KEYS, QUERIES, note
from jaxpar.models.settings.computing import why_no_part
from jaxpar.parallel.techniques.ring_attention.ring import AXIS, RingDevices, repeated_kv_heads

TOKENS, GROUPS = 256, 2
# relative error, in the norm. Attention that rounds its weights and output to bfloat16 is off by
# 0.3 to 0.6 %, 8 times less in float16; gradients through JAX's own logsumexp, which has none, by 33 %
BAND = {"bfloat16": 0.02, "float16": 0.004}
WAY_OUT = "parallel.context_kernel = 'plain', which runs blocks of plain JAX; please report what was found"


@cache
def check_kernel(kernel: FusedKernel, dtype: str, head_dim: int, shared: int, window: int | None = None) -> None:
    """Compares parts of attention by a kernel with plain JAX, once per set of arguments.

    Args:
      kernel: The kernel.
      dtype: Dtype of the queries, bfloat16 or float16.
      head_dim: Size of a head.
      shared: Query heads per head of keys and values.
      window: As in `AttentionMask`, for one part with all tokens; None for two parts.

    Raises:
      JaxparError: If the results differ by more than `BAND`, or the kernel does not run.
    """
    subject = f"cuDNN's kernel for {dtype} heads of {head_dim} on {jax.local_devices()[0].device_kind}"
    # in its own thread, which does not share the caller's trace, mesh or settings
    with ThreadPoolExecutor(1) as pool:
        try:
            errors = pool.submit(
                relative_errors, kernel, dtype, head_dim=head_dim, shared=shared, window=window
            ).result()
        except jax.errors.JaxRuntimeError as error:
            raise refuse(
                f"{subject} does not run: {str(error).strip().splitlines()[0][:200]}",
                rule="a part of attention runs on the device before a step is made of it",
                fix=WAY_OUT,
            ) from error
    wrong = [f"{name} by {deviation:.1%}" for name, deviation in errors.items() if not deviation <= BAND[dtype]]
    if wrong:
        raise refuse(
            f"{subject} is off: {', '.join(wrong)}",
            rule=f"attention in parts by it differs from plain JAX in float32 by {BAND[dtype]:.1%} at most",
            fix=WAY_OUT,
        )


def relative_errors(
    kernel: FusedKernel, dtype: str, *, head_dim: int, shared: int, window: int | None = None
) -> Mapping[str, float]:
    """Computes the relative errors of the output and the gradients of q, k and v: |difference| / |expected|."""
    window = None if window is None else min(window, TOKENS // 2)  # a longer window would mask no key here
    rng = np.random.default_rng(0)
    sizes = (GROUPS * shared, GROUPS, GROUPS, GROUPS * shared)
    q, k, v, grad = (jnp.asarray(rng.normal(size=(1, TOKENS, heads, head_dim)), dtype) for heads in sizes)
    if window is None:
        grad = grad.at[:, : TOKENS // 2].set(0)  # results for the early half of queries, which the parts do not compute
    with jax.default_matmul_precision("highest"):
        exact = partial(blockwise, rule=AttentionMask(True, window))
        expected = jax.jit(partial(_forward_and_backward, exact))(*(x.astype(jnp.float32) for x in (q, k, v, grad)))
    attention = _run_two_calls if window is None else _run_one_call
    results = jax.jit(partial(attention, kernel, window))(q, k, v, grad)
    names = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
    return {name: _relative_error(*pair) for name, *pair in zip(names, results, _half(expected, window), strict=True)}


def _forward_and_backward(attention, q, k, v, grad):
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(grad)


def _half(expected, window: int | None):
    """Selects the late half of outputs and gradients of queries: `_run_two_calls` computes only those."""
    out, dq, *key_grads = expected
    return (out, dq, *key_grads) if window is not None else (*(x[:, TOKENS // 2 :] for x in (out, dq)), *key_grads)


def _run_one_call(kernel: FusedKernel, window: int | None, q, k, v, grad):
    out, logsumexp = kernel.forward(q, k, v, causal=True, window=window)
    return out, *kernel.backward(q, k, v, out, logsumexp, grad, causal=True, window=window)


def _run_two_calls(kernel: FusedKernel, window: None, q, k, v, grad):
    """Attention of the late half of queries, first to the late keys, then to the early keys as in a ring."""
    half = TOKENS // 2
    q, grad = q[:, half:], grad[:, half:]
    parts = [(True, k[:, half:], v[:, half:]), (False, k[:, :half], v[:, :half])]
    (out, logsumexp), early_sums = (kernel.forward(q, *kv, causal=causal) for causal, *kv in parts)
    out, logsumexp = merge((out.astype(jnp.float32), logsumexp), early_sums)
    out = out.astype(q.dtype)
    late, early = (kernel.backward(q, *kv, out, logsumexp, grad, causal=causal) for causal, *kv in parts)
    dk, dv = (jnp.concatenate(pair, axis=1) for pair in zip(early[1:], late[1:], strict=True))
    return out, late[0].astype(jnp.float32) + early[0], dk, dv


def _relative_error(got: jax.Array, reference: jax.Array) -> float:
    result, expected = (np.asarray(x, np.float64) for x in (got, reference))
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


# Requirements of travelling sequence shards: the devices divide tokens and heads.


def check(q: jax.Array, k: jax.Array, ways: RingDevices, *, causal: bool) -> None:
    """Refuses unequal shards, and numbers of heads that cannot be exchanged.

    Raises:
      JaxparError: If the devices do not divide the tokens, or the devices of a group do not divide the heads.
    """
    devices = ways.ring * ways.ulysses
    halves = 2 if causal and ways.ring > 1 else 1
    parts = math.lcm(devices, halves * ways.ring)
    for role, tokens in (("queries", q.shape[1]), ("keys", k.shape[1])):
        if tokens % parts:
            raise refuse(
                f"{tokens} {role} over context={devices} by {form_name(ways)}",
                rule=f"pieces that travel are of one size{', and in a causal ring halves of them' * (halves == 2)}: "
                f"{parts} divides the tokens",
                fix=f"sequences of {-(-tokens // parts) * parts} tokens, or context_by='gather'",
            )
    heads, groups = q.shape[2], k.shape[2]
    if ways.ulysses > 1 and heads % repeated_kv_heads(groups, ways):
        suffix = f" x tensor={ways.tensor}" if ways.tensor > 1 else ""
        raise refuse(
            f"{heads} heads, {groups} of keys, over ulysses={ways.ulysses}{suffix}",
            rule="devices that exchange heads have equally many heads, of keys too, which may be repeated",
            fix=f"ulysses={_fitting(heads, groups, ways) or 'a number that divides them'}, or context_by='ring'",
        )


def form_name(ways: RingDevices) -> str:
    """Returns the name of an implementation."""
    if ways.ulysses == 1:
        return "ring"
    return "ulysses" if ways.ring == 1 else f"ring x ulysses, ulysses={ways.ulysses}"


def _fitting(heads: int, groups: int, ways: RingDevices) -> int:
    """Returns the largest `ulysses` above 1 that divides devices and heads; 0 if there is none."""
    devices = ways.ring * ways.ulysses
    fits = [
        u
        for u in range(2, devices + 1)
        if devices % u == 0 and heads % repeated_kv_heads(groups, RingDevices(devices // u, u, ways.tensor)) == 0
    ]
    return max(fits, default=0)


class AttentionSharding(NamedTuple):
    """The axes that split examples and heads in a call of attention whose sequences `context` splits.

    Attributes:
      batch: Axes of examples.
      heads: Axes of heads.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def axes(self) -> set[str]:
        """All of these axes, and that of the sequence."""
        return {AXIS, *self.batch, *self.heads}

    @property
    def pieces(self) -> P:
        """Spec of q, k, v and the output. Shape [b, s, heads, k]."""
        return P(self.batch or None, AXIS, self.heads or None)

    @property
    def statistics(self) -> P:
        """Spec of the logsumexp of a kernel. Shape [b, h, s]."""
        return P(self.batch or None, self.heads or None, AXIS)


def choose(
    q: jax.Array, k: jax.Array, *, rule: AttentionMask, segments: jax.Array | None, ways: RingDevices, requested: str
) -> tuple[FusedKernel | None, AttentionSharding]:
    """Returns the kernel that runs parts of attention, None for plain JAX, and the axes that split the call.

    Args:
      q: Queries. Shape [batch, seq, heads, head_dim].
      k: Keys.
      rule: The mask, and the cap of the scores.
      segments: Shape [batch, seq], or None.
      ways: The devices of the ring.
      requested: One of `KERNELS`.

    Raises:
      JaxparError: If the kernel is requested but does not run here; if it fails `check_kernel`.
    """
    cut = _find_sharding(q, k)
    uneven = cut if isinstance(cut, str) else None
    cut = AttentionSharding() if isinstance(cut, str) else cut
    if requested == "plain":
        _say(ways, "parallel.context_kernel = 'plain'")
        return None, cut
    why = _refusal(q, rule, segments, ways) or uneven or _no_gpu(requested)
    if why is None:
        kernel = kernel_override() or CUDNN
        if kernel is CUDNN and jax.default_backend() == "gpu":
            shared = q.shape[2] // repeated_kv_heads(k.shape[2], ways)  # of the heads that the call has
            check_kernel(kernel, str(q.dtype), q.shape[-1], shared, rule.window)
        note(f"{form_name(ways)}: parts of attention are run by cuDNN's kernel, and added up by its float32 statistics")
        return kernel, cut
    if requested == "cudnn":
        raise refuse(
            f"context_kernel='cudnn' for q {q.dtype}{list(q.shape)} by {form_name(ways)}: {why}",
            rule="cuDNN's kernel runs parts of attention on GPUs in 16 bits, heads of a multiple of 8 up to 256 (128 "
            "before Hopper), without segments or a softcap, and with a window only by ulysses",
            fix="context_kernel='auto', which runs blocks of plain JAX there and says so",
        )
    _say(ways, why)
    return None, cut


def _refusal(q: jax.Array, rule: AttentionMask, segments: jax.Array | None, ways: RingDevices) -> str | None:
    """Explains why cuDNN's kernel cannot run such a call on any device; None if it can."""
    return why_no_part(
        dtype=str(q.dtype), head_dim=q.shape[-1], causal=rule.causal, window=rule.window,
        segments=segments is not None, softcap=rule.softcap is not None, ring=ways.ring, capability=capability(),
    )  # fmt: skip


def _no_gpu(requested: str) -> str | None:
    """Explains why cuDNN's kernel does not run on the devices of the mesh; None if it does."""
    if kernel_override() is not None:
        return None
    if not _for_gpus():
        return "these devices are no GPUs"
    if jax.default_backend() != "gpu" and requested != "cudnn":
        return "on GPUs that are there it would be; parallel.context_kernel = 'cudnn' compiles its calls for these too"
    return None


def _for_gpus() -> bool:
    """Whether the traced program is for GPUs, present or not."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) not in ("cpu", "tpu")


def _say(ways: RingDevices, why: str) -> None:
    if _for_gpus() or kernel_override() is not None:  # simulated devices run plain JAX, always
        note(f"{form_name(ways)}: parts of attention are run in blocks of plain JAX, not by cuDNN's kernel: {why}")


def _find_sharding(q: jax.Array, k: jax.Array) -> AttentionSharding | str:
    """Returns the axes that split examples and heads, or the reason why the kernel does not support them."""
    specs = get_spec(QUERIES), get_spec(KEYS)
    mesh = jax.sharding.get_abstract_mesh()
    free = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    ways = {axis: size for axis, size in mesh.shape.items() if axis in free and size > 1}
    of_q, of_k = (
        [tuple(axis for axis in spec_axes(entry) if axis in ways) for entry in spec or (None, AXIS, None, None)]
        for spec in specs
    )
    if any(entry is P.UNCONSTRAINED for spec in specs for entry in spec or ()):
        return "how examples and heads are cut is left to XLA"
    if set(of_q[1]) - {AXIS} or of_q[3]:
        return f"{' and '.join({*of_q[1], *of_q[3]} - {AXIS})} cuts tokens or heads too"
    if of_q != of_k:
        return "the axes cannot split the heads of keys as they split the heads of queries"
    batch, heads = (math.prod(ways[axis] for axis in of_q[dim]) for dim in (0, 2))
    if q.shape[0] % batch or q.shape[2] % heads or k.shape[2] % heads:
        return f"{q.shape[0]} examples over {batch} devices, or {k.shape[2]} heads of keys over {heads}, are not equal"
    return AttentionSharding(of_q[0], of_q[2])
