"""The training jobs that stages measure: decoders of three sizes, as a declaration and as the planner sees them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp
from jaxpar.inspector import stand_in_attention
from jaxpar.inspector.report import Report, build_report
from jaxpar.inspector.subject import step_subject
from jaxpar.mesh.absent_gpus import find_target_config, target_devices
from jaxpar.models.islands import use_islands
from jaxpar.plan.candidate import Candidate, recompute_shares
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.memory import memory
from jaxpar.plan.model.layer_time import attention
from jaxpar.plan.model.shape import Shape, step_flop
from jaxpar.plan.time import step_time

from ...gpu.predicted import Numbers


@dataclass(frozen=True, kw_only=True)
class Training:
    """A decoder that is trained on one device, in bfloat16 with clipped gradients and AdamW.

    Attributes:
      layers: Blocks.
      dim: Width of the stream.
      heads: Attention heads.
      hidden: Width of the feed-forward, which is gated.
      vocab: Tokens there are.
      seq: Tokens of a sequence.
      batch: Sequences of a step.
      remat: What the backward pass keeps.
      precision: Of matmuls.
      offload: Whether the optimizer state is in host memory between steps.
      scan: One compiled block, instead of one copy per layer.
    """

    layers: int
    dim: int
    heads: int
    hidden: int
    vocab: int
    seq: int
    batch: int
    remat: str = "none"
    precision: str = "bf16"
    offload: bool = False
    scan: bool = True

    @property
    def settings(self) -> jp.DecoderConfig:
        """The decoder."""
        own = {key: getattr(self, key) for key in ("layers", "dim", "heads", "hidden", "vocab", "seq", "scan")}
        return jp.DecoderConfig(**own)

    @property
    def shape(self) -> Shape:
        """The decoder as the planner sees it."""
        return Shape.from_settings(self.settings)

    @property
    def flop(self) -> float:
        """FLOP of a step, nothing computed twice; see `jaxpar.plan.model.shape.step_flop`."""
        return float(step_flop(self.shape, self.batch))

    @property
    def candidate(self) -> Candidate:
        """The layout as the planner sees it."""
        return Candidate(microbatch=self.batch, remat=self.remat)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    def batches(self) -> dict[str, np.ndarray]:
        """Returns a batch of random tokens."""
        tokens = np.random.default_rng(0).integers(0, self.vocab, (self.batch, self.seq + 1), np.int32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def on(self, devices: Any) -> "Built":
        """Returns the job on a device."""
        return Built(self, list(devices)[:1])


@dataclass(frozen=True)
class Built:
    """A training job on one device, there or absent; what takes time is made when it is asked for."""

    training: Training
    devices: list[Any]

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW after clipping, as the twins have it."""
        return make_optimizer()

    @cached_property
    def step(self) -> Any:
        """The step, not compiled yet."""
        job = self.training
        layout = jp.compose(partial(jp.Decoder, job.settings), jp.Parallel(), self.devices)
        return jp.train_step(
            layout, self.loss, self.optimizer, precision=job.precision, remat=job.remat, offload=job.offload
        )

    @property
    def loss(self) -> Callable:
        """The loss; on a GPU that is not there, of a model whose attention is what stands in for cuDNN's."""
        absent = find_target_config(self.devices[0]) is not None
        return _with_stand_in if absent and self.training.precision == "bf16" else jp.next_token_loss

    def state(self) -> Any:
        """Returns a state at step 0."""
        return jp.init_state(self.step.layout, self.optimizer, offload=self.training.offload)

    @property
    def static(self) -> int:
        """Bytes of parameters, optimizer state and batch, by arithmetic on shapes."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((self.step.abstract(), self.batch)))

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch."""
        shape = (self.training.batch, self.training.seq)
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}


def _with_stand_in(model: Any, batch: Any) -> Any:
    with use_islands({"attention": stand_in_attention.attention}):
        return jp.next_token_loss(model, batch)


CLIP = 1.0  # the norm of all gradients together, above which they are scaled down to it


def make_optimizer() -> optax.GradientTransformation:
    """Returns the optimizer of all sides of a comparison."""
    return optax.chain(optax.clip_by_global_norm(CLIP), elementwise())


def elementwise() -> optax.GradientTransformation:
    """Returns the part of it that sees each entry alone."""
    return optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1)


@cache
def compiled(job: Training, chip: str) -> tuple[Report, int]:
    """Returns the report of a job's step on a chip that is not there, and the bytes of its state and batch."""
    built = job.on(target_devices(f"{chip}:1x1"))
    return build_report(step_subject(built.step, built.batch)), built.static


def predict_memory(job: Training, hardware: Hardware) -> Numbers:
    """Returns the bytes of a job's step on one device: of its state by arithmetic, at its peak by XLA and the planner.

    XLA counts no workspace of cuDNN and cuBLAS, and the planner nothing that XLA makes of its own accord.
    """
    found, static = compiled(job, hardware.chip.key)
    return {
        "exact_static_bytes": static,
        "compiler_peak_bytes": found.total,
        "planner_peak_bytes": float(memory(job.shape, job.candidate, JAXPAR_FUSED).total),
    }


def predict_time(job: Training, hardware: Hardware) -> Numbers:
    """Returns the seconds of a job's step on one device: by replaying its program, and by the planner.

    The timeline knows no time of attention's kernel; it is the planner's.
    """
    found, _ = compiled(job, hardware.chip.key)
    core = sum(attention_seconds(job, hardware))
    kernels = found.timeline.seconds if found.timeline else float("nan")
    return {
        "timeline_seconds": kernels + core,
        "planner_seconds": float(step_time(job.shape, job.candidate, hardware, JAXPAR_FUSED).total),
        "attention_alone": core,
    }


def attention_seconds(job: Training, hardware: Hardware) -> tuple[float, float]:
    """Returns the planner's seconds of attention in all layers: forward, with what is computed again; backward."""
    forward, backward = attention(job.shape, job.candidate, hardware, JAXPAR_FUSED)
    return job.layers * float(forward * (1 + recompute_shares(job.candidate).attention)), job.layers * float(backward)


TINY = Training(layers=2, dim=16, heads=2, hidden=32, vocab=64, seq=16, batch=2)
REAL = {
    # the widths of GPT-3's small, medium and XL (arXiv:2005.14165, table 2.1) with the gates and the two ends of a
    # Llama; named by the parameters that multiply, which the embedding does not
    "124m": Training(layers=12, dim=768, heads=12, hidden=2048, vocab=50304, seq=1024, batch=32),
    "350m": Training(layers=24, dim=1024, heads=16, hidden=2752, vocab=50304, seq=1024, batch=16),
    "1b3": Training(layers=24, dim=2048, heads=16, hidden=5504, vocab=50304, seq=2048, batch=4),
}
