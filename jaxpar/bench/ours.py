"""The twin's step, declared with jaxpar; as a program it makes one first step and ends."""

import sys
from functools import partial

import jaxpar as jp
from jaxpar.bench import twin


def build(parallel: jp.Parallel):
    """Returns (state, step) of the same model, mesh and optimizer as the twin's."""
    from jaxpar.models.decoder import Decoder, DecoderSettings

    settings = DecoderSettings(
        vocab=twin.VOCAB, seq=twin.SEQ, layers=twin.LAYERS, dim=twin.DIM, heads=twin.HEADS, hidden=twin.HIDDEN
    )
    layout = jp.compose(partial(Decoder, settings), parallel)
    optimizer = twin.make_optimizer()
    return jp.init_state(layout, optimizer), jp.train_step(layout, jp.next_token, optimizer)


if __name__ == "__main__":
    import jax

    jp.simulate(8)
    data, fsdp, tensor = map(int, sys.argv[1:4])
    state, step = build(jp.Parallel(data=data, fsdp=fsdp, tensor=tensor))
    jax.block_until_ready(step(state, twin.make_batch(step.layout.mesh)))
    print("first step", flush=True)
