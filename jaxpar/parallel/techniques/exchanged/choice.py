"""Which runs a device's part of attention, and how the call is cut for it: cuDNN's kernel, or blocks of plain JAX.

    cuDNN's kernel    on GPUs, in 16 bits: heads that fit, no segments or softcap, a window only in one group
    plain JAX         else, and always on simulated devices; on GPUs that are not there, unless the kernel is asked for

For GPUs that are not there XLA compiles the kernel's calls as they are, without cuDNN: the memory that it works in, its
FLOP and its time are then unknown. Each device runs its part with its own arrays, where what cuts examples and heads
cuts them evenly, and heads of keys as those of queries: a kernel is foreign to XLA, which would gather all that it is
given. Which of the two runs is noted.
"""

import math
from typing import NamedTuple

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.errors import refuse
from jaxpar.models.blocks.chosen import capability
from jaxpar.models.blocks.fused import CUDNN, Fused, instead
from jaxpar.models.blocks.rule import Rule
from jaxpar.models.blocks.trial import try_out
from jaxpar.models.islands import KEYS, QUERIES, note
from jaxpar.models.named import axes_of, spec_of
from jaxpar.models.settings.cudnn import why_no_part
from jaxpar.parallel.techniques.exchanged.checks import name
from jaxpar.parallel.techniques.exchanged.heads import repeated
from jaxpar.parallel.techniques.exchanged.ways import AXIS, Ways

KERNELS = ("auto", "cudnn", "plain")  # what may be asked for


class Cut(NamedTuple):
    """The axes that cut examples and heads, besides those of the sequence, where each device runs its own part.

    Attributes:
      batch: Of examples.
      heads: Of heads.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def axes(self) -> set[str]:
        """All of them, and that of the sequence."""
        return {AXIS, *self.batch, *self.heads}

    @property
    def pieces(self) -> P:
        """How q, k, v and the output are cut. Shape [b, s, heads, k]."""
        return P(self.batch or None, AXIS, self.heads or None)

    @property
    def statistics(self) -> P:
        """How the logsumexp of a kernel is cut. Shape [b, h, s]."""
        return P(self.batch or None, self.heads or None, AXIS)


def choose(
    q: jax.Array, k: jax.Array, *, rule: Rule, segments: jax.Array | None, ways: Ways, asked: str
) -> tuple[Fused | None, Cut]:
    """Returns the kernel that runs parts of attention, None for plain JAX, and how the call is cut for them.

    Args:
      q: Queries. Shape [batch, seq, heads, head_dim].
      k: Keys.
      rule: Which keys a query sees, and how large its scores can be.
      segments: Shape [batch, seq], or None.
      ways: The devices.
      asked: One of `KERNELS`.

    Raises:
      JaxparError: If the kernel is asked for where it does not run; if it fails its trial.
    """
    cut = _cut(q, k)
    uneven = cut if isinstance(cut, str) else None
    cut = Cut() if isinstance(cut, str) else cut
    if asked == "plain":
        _say(ways, "parallel.context_kernel = 'plain'")
        return None, cut
    why = _refusal(q, rule, segments, ways) or uneven or _no_gpu(asked)
    if why is None:
        kernel = instead() or CUDNN
        if kernel is CUDNN and jax.default_backend() == "gpu":
            shared = q.shape[2] // repeated(k.shape[2], ways)  # of the heads that the call has
            try_out(kernel, str(q.dtype), q.shape[-1], shared, rule.window)
        note(f"{name(ways)}: parts of attention are run by cuDNN's kernel, and added up by its float32 statistics")
        return kernel, cut
    if asked == "cudnn":
        raise refuse(
            f"context_kernel='cudnn' for q {q.dtype}{list(q.shape)} by {name(ways)}: {why}",
            rule="cuDNN's kernel runs parts of attention on GPUs in 16 bits, heads of a multiple of 8 up to 256 (128 "
            "before Hopper), without segments or a softcap, and with a window only by ulysses",
            fix="context_kernel='auto', which runs blocks of plain JAX there and says so",
        )
    _say(ways, why)
    return None, cut


def _refusal(q: jax.Array, rule: Rule, segments: jax.Array | None, ways: Ways) -> str | None:
    """Returns why cuDNN's kernel cannot run such a call anywhere."""
    return why_no_part(
        dtype=str(q.dtype), head_dim=q.shape[-1], causal=rule.causal, window=rule.window,
        segments=segments is not None, softcap=rule.softcap is not None, ring=ways.ring, capability=capability(),
    )  # fmt: skip


def _no_gpu(asked: str) -> str | None:
    """Returns why it does not run on the devices of the mesh."""
    if instead() is not None:
        return None
    if not _for_gpus():
        return "these devices are no GPUs"
    if jax.default_backend() != "gpu" and asked != "cudnn":
        return "on GPUs that are there it would be; parallel.context_kernel = 'cudnn' compiles its calls for these too"
    return None


def _for_gpus() -> bool:
    """Returns whether what is traced is for GPUs, be they here or not."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) not in ("cpu", "tpu")


def _say(ways: Ways, why: str) -> None:
    if _for_gpus() or instead() is not None:  # simulated devices run plain JAX, always
        note(f"{name(ways)}: parts of attention are run in blocks of plain JAX, not by cuDNN's kernel: {why}")


def _cut(q: jax.Array, k: jax.Array) -> Cut | str:
    """Returns the axes that cut examples and heads, or why the kernel cannot be called as they do."""
    specs = spec_of(QUERIES), spec_of(KEYS)
    mesh = jax.sharding.get_abstract_mesh()
    free = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    ways = {axis: size for axis, size in mesh.shape.items() if axis in free and size > 1}
    of_q, of_k = (
        [tuple(axis for axis in axes_of(entry) if axis in ways) for entry in spec or (None, AXIS, None, None)]
        for spec in specs
    )
    if any(entry is P.UNCONSTRAINED for spec in specs for entry in spec or ()):
        return "how examples and heads are cut is left to XLA"
    if set(of_q[1]) - {AXIS} or of_q[3]:
        return f"{' and '.join({*of_q[1], *of_q[3]} - {AXIS})} cuts tokens or heads too"
    if of_q != of_k:
        return "heads of keys are not cut as those of queries are"
    batch, heads = (math.prod(ways[axis] for axis in of_q[dim]) for dim in (0, 2))
    if q.shape[0] % batch or q.shape[2] % heads or k.shape[2] % heads:
        return f"{q.shape[0]} examples over {batch} devices, or {k.shape[2]} heads of keys over {heads}, are not equal"
    return Cut(of_q[0], of_q[2])
