"""Numbers on a GPU and numbers on the processor: the same training, whatever is kept, offloaded or restored.

processor    five steps in float32, its losses to 1e-4
bf16         five steps with cuDNN's attention, in a band around those
remat, ...   each beside the plain step on the GPU: the same bits, or how far off
checkpoint   saved on the GPU, restored on the processor, trained one step on both
hugging face logits of the models that jaxpar's tests have, which transformers computed
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxpar
import jaxpar as jp
from jaxpar.mesh.devices import visible_devices

from ...gpu.jobs.training import Training, make_optimizer
from ...gpu.stage import Stage
from ...gpu.work import Work

CLOSE, BAND = 1e-4, 2e-2  # relative: float32 on both; bfloat16 beside float32
PLAIN = Training(layers=2, dim=64, heads=4, hidden=128, vocab=256, seq=64, batch=8, precision="fp32")
SETTINGS = {
    "remat": {"remat": "full"}, "accumulate": {"accumulate": 2}, "guard": {"guard": True}, "offload": {"offload": True}
}  # fmt: skip
SAVED = Path(jaxpar.__file__).parents[1] / "tests" / "data" / "huggingface"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage.

    Attributes:
      job: In float32.
      steps: That are compared.
      settings: Of a step that change no number, by name.
      models: Folders of Hugging Face's.
    """

    job: Training
    steps: int
    settings: Mapping[str, Mapping[str, Any]]
    models: tuple[str, ...]


def run(work: Work) -> None:
    """Measures."""
    device, processor, sizes = visible_devices()[0], jax.local_devices(backend="cpu")[0], work.sizes
    job, steps = sizes.job, sizes.steps
    with jax.default_matmul_precision("highest"):
        here = work.measure("losses", lambda: {"losses": losses(job, device, steps)})["losses"]
        work.measure("processor", lambda: near(here, losses(job, processor, steps), CLOSE))
        for name, settings in sizes.settings.items():
            work.measure(name, lambda settings=settings: same(here, job, device, steps, settings))
        work.measure("checkpoint", lambda: _restored(job, device, processor))
        for name in sizes.models:
            work.measure(f"hugging face {name}", lambda name=name: _logits(name, device))
    low = replace(job, precision="bf16")
    work.measure("bf16", lambda: near(losses(low, device, steps), here, BAND))


def losses(job: Training, device: Any, steps: int, **settings: Any) -> list[float]:
    """Returns the losses of some steps on one device, each on a batch of its own."""
    layout = jp.compose(lambda rngs: jp.Decoder(job.settings, rngs=rngs), jp.Parallel(), [device])
    optimizer = make_optimizer()
    step = jp.train_step(layout, jp.next_token_loss, optimizer, precision=job.precision, **settings)
    state = jp.init_state(layout, optimizer, offload=settings.get("offload", False))
    found = []
    for number in range(steps):
        state, metrics = step(state, _batch(job, number))
        found.append(float(metrics["loss"]))
    return found


def near(found: list[float], wanted: list[float], band: float) -> dict[str, Any]:
    """Returns how far losses are from others, relative to them, and whether that is within a band."""
    off = max(abs(one / other - 1) for one, other in zip(found, wanted, strict=True))
    return {"off": off, "band": band, "holds": bool(off <= band), "losses": found, "wanted": wanted}


def same(wanted: list[float], job: Training, device: Any, steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns whether a setting of the step changes a bit of a loss."""
    try:
        found = losses(job, device, steps, **settings)
    except (jp.JaxparError, jax.errors.JaxRuntimeError) as error:  # what this device has not
        return {"absent": str(error).splitlines()[0][:300]}
    return {"same_bits": found == wanted, **near(found, wanted, CLOSE)}


def _batch(job: Training, number: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(number).integers(0, job.vocab, (job.batch, job.seq + 1), np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def _restored(job: Training, device: Any, processor: Any) -> dict[str, Any]:
    """Returns whether the processor restores every bit that the GPU saved, and how near the next losses are."""
    try:
        from jaxpar.checkpoint import Checkpoints, Store
    except ModuleNotFoundError as error:  # a machine may lack what checkpoints need, and no other stage does
        return {"absent": str(error)}
    there, here = job.on([device]), job.on([processor])
    state, _ = there.step(there.state(), _batch(job, 0))
    with tempfile.TemporaryDirectory(prefix="jaxpar-") as folder:
        store = Store(Path(folder), Checkpoints())
        store.save(1, state, {})
        store.finish()
        again, _ = store.restore(here.step.abstract())
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True)
    bits = all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)
    next_losses = [float(built.step(of, _batch(job, 1))[1]["loss"]) for built, of in ((there, state), (here, again))]
    return {"same_bits": bits, **near(next_losses[:1], next_losses[1:], CLOSE)}


def _logits(name: str, device: Any) -> dict[str, Any]:
    """Returns how far logits on the device are from those that transformers computed."""
    if not (SAVED / name).is_dir():
        return {"absent": f"{SAVED / name}: only a checkout has it"}
    from flax import nnx

    from jaxpar.models.huggingface.weights import load

    found = load(SAVED / name)
    with nnx.use_eager_sharding(False), jax.default_device(device):
        graph, state = nnx.split(nnx.eval_shape(lambda: jp.Decoder(found.settings, rngs=nnx.Rngs(0))))
        flat = [(path, leaf.replace(jax.numpy.asarray(found.params["/".join(map(str, path))][...])))
                for path, leaf in nnx.to_flat_state(state)]  # fmt: skip
        model = nnx.merge(graph, nnx.from_flat_state(flat))
        logits = np.asarray(model(jax.numpy.asarray(np.arange(24, dtype=np.int32).reshape(2, 12) * 7 % 40)))
    wanted = np.load(SAVED / name / "logits.npy", allow_pickle=False)
    off = float(np.abs(logits - wanted).max() / np.abs(wanted).max())
    return {"off": off, "band": CLOSE, "holds": off <= CLOSE}


STAGE = Stage(
    name="parity", seconds=90, limit=200,
    measures="losses in float32 and bfloat16, settings that change no bit, a checkpoint, Hugging Face's logits",
    beside="the processor, and tests",
    real=Sizes(PLAIN, steps=5, settings=SETTINGS, models=("llama", "llama_tied", "gpt2")),
    tiny=Sizes(
        replace(PLAIN, layers=1, dim=16, heads=2, hidden=32, vocab=32, seq=8, batch=2), steps=1,
        settings={}, models=(),
    ),
    run=run,
)  # fmt: skip
