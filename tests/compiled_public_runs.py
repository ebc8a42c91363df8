"""The first layouts of plans for public runs as jaxpar's own programs, compiled for GPUs that are not there.

`python tests/compiled_public_runs.py` compiles those of runs for which `plan/test_public_runs.py` has a cheaper first,
and writes what XLA assigns to `plan/public_large_runs_compiled.json`, half an hour; with names of runs, those alone.
A program has the axes, the ZeRO stage, the microbatches, the chunks and the recomputation of the layout. What of it is
jaxpar's, and not of the software that ran:

    layers       as many as all parts together have places for: 128 for 126 on 16 stages
    schedule     phased, which keeps more microbatches; of the same chunks
    attention    over whole sequences with cuDNN's operands and results (`stand_in_attention`); over pieces, in a ring;
                 neither keeps scores, as Megatron-LM did in 2021: what a plan predicts for that counts them
    state        float32 parameters, gradients, mean and variance: 16 bytes per parameter
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp
from jaxpar.inspector import stand_in_attention
from jaxpar.inspector.compiled import compile_program
from jaxpar.inspector.memory_causes import total
from jaxpar.measure.record import commit, versions
from jaxpar.models.islands import override_cudnn
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.search import describe

RECORD = Path(__file__).parent / "plan/public_large_runs_compiled.json"
PHASED = {"1f1b": "1f1b_phased", "interleaved": "interleaved_phased"}


def record() -> dict[tuple[str, str], int]:
    """Returns the bytes of a device by run and layout."""
    return {(each["run"], each["layout"]): each["bytes"] for each in json.loads(RECORD.read_text())["programs"]}


def settings_of(shape: Shape, parts: int) -> jp.DecoderConfig:
    """Returns a decoder of these widths, with as many layers as so many equal parts need."""
    more = {"position": "learned", "norm": "layer", "use_bias": True} if shape.learned else {}
    return jp.DecoderConfig(
        layers=-(-shape.layers // parts) * parts, dim=shape.dim, heads=shape.heads, kv_heads=shape.kv_heads,
        hidden=shape.hidden, gated=shape.gated, vocab=shape.vocab, seq=shape.seq, tied=shape.tied, **more,
    )  # fmt: skip


def parallel_of(c: Candidate) -> jp.Parallel:
    """Returns a layout of a plan as a declaration."""
    how = {
        "pipeline": jp.Pipeline(
            schedule=PHASED[c.schedule], chunks=c.chunks, microbatches=c.microbatches, keep="residuals"
        )
    }
    ring = {"context": c.context, "context_by": "ring"}
    return jp.Parallel(
        pipe=c.pipe, data=c.data, fsdp=c.fsdp, tensor=c.tensor, sequence=bool(c.sequence), zero=c.zero or None,
        **(how if c.pipe > 1 else {}), **(ring if c.context > 1 else {}),
    )  # fmt: skip


def needed(shape: Shape, candidate: Candidate, chip: str) -> int:
    """Returns the bytes of a device that XLA assigns to a step: arguments, results and temporaries."""
    settings, nodes = settings_of(shape, candidate.pipe * candidate.chunks), candidate.devices // 8
    layout = jp.compose(partial(jp.Decoder, settings), parallel_of(candidate), jp.target_devices(f"{chip}:{nodes}x8"))
    alone = candidate.microbatches if candidate.pipe == 1 else 1
    step = jp.train_step(
        layout, jp.next_token_loss, optax.adamw(1e-4), precision="bf16", remat=candidate.remat, accumulate=alone
    )
    count = candidate.microbatch * candidate.microbatches * candidate.replicas
    rows = jax.ShapeDtypeStruct((count, settings.seq), jnp.int32)
    with override_cudnn(stand_in_attention.attention):
        lowered = step.lower(step.abstract(), {"inputs": rows, "targets": rows})
    return int(total(compile_program(lowered, list(layout.device_mesh.devices.flat))))


def main(names: list[str]) -> None:
    """Compiles the first layout of each run, and adds it to the record."""
    from test_public_runs import RUNS, answer

    for name in names or [each for each in RUNS if answer(each).verdict.startswith("cheaper")]:
        run, first = RUNS[name], answer(name).plan.best[0].candidate
        made = needed(run.shape, first, run.hardware.chip.key)
        row = {
            "run": name, "layout": describe(first), "chip": run.hardware.chip.key, "bytes": made,
            "versions": versions(), "commit": commit(),
        }  # fmt: skip
        print(f"{name}: {row['layout']}: {made / 2**30:.2f} GiB", flush=True)
        others = [each for each in json.loads(RECORD.read_text())["programs"] if each["run"] != name]
        RECORD.write_text(json.dumps({"programs": [*others, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
