"""The steps of the twins, declared with jaxpar; as a program it makes the twin's first step and ends."""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import jaxpar as jp

from .. import twin


def build(parallel: jp.Parallel):
    """Returns (state, step) of the same model, mesh and optimizer as the twin's."""
    from jaxpar.models.decoder import Decoder
    from jaxpar.models.settings.decoder import DecoderConfig

    settings = DecoderConfig(
        vocab=twin.VOCAB, seq=twin.SEQ, layers=twin.LAYERS, dim=twin.DIM, heads=twin.HEADS, hidden=twin.HIDDEN
    )
    layout = jp.compose(partial(Decoder, settings), parallel)
    optimizer = twin.make_optimizer()
    return jp.init_state(layout, optimizer), jp.train_step(layout, jp.next_token_loss, optimizer)


def like_expert(model: Any, sizes: Mapping[str, int], optimizer: Any, devices: Any = None):
    """Returns the step of the expert's model.

    Args:
      model: `expert.Llama`.
      sizes: Of the mesh.
      optimizer: With the clipping that the expert does himself.
      devices: Absent GPUs; None takes those of this process.
    """
    shape = ("vocab", "seq", "layers", "dim", "heads", "hidden")
    settings = jp.DecoderConfig(**{name: getattr(model, name) for name in shape}, scan=not model.unrolled)
    layout = jp.compose(partial(jp.Decoder, settings), jp.Parallel(**sizes), devices)
    return jp.train_step(layout, jp.next_token_loss, optimizer, remat="full" if model.remat else "none")


if __name__ == "__main__":
    import jax

    jp.simulate(8)
    data, fsdp, tensor = map(int, sys.argv[1:4])
    state, step = build(jp.Parallel(data=data, fsdp=fsdp, tensor=tensor))
    jax.block_until_ready(step(state, twin.make_batch(step.layout.mesh)))
    print("first step", flush=True)
