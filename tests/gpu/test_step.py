"""A step on a real GPU: the losses of the processor, and no more memory than the device has given."""

import jax
import numpy as np
import optax

import jaxpar as jp


def losses(devices, steps=5):
    settings = jp.DecoderConfig(vocab=64, seq=32, layers=2, dim=64, heads=4)
    layout = jp.compose(lambda rngs: jp.Decoder(settings, rngs=rngs), jp.Parallel(data=len(devices)), devices)
    optimizer = optax.adamw(1e-2)
    state, step = jp.init_state(layout, optimizer), jp.train_step(layout, jp.next_token_loss, optimizer)
    tokens = np.random.default_rng(0).integers(0, 64, (steps, 8, 33))
    found = []
    for each in tokens:
        state, metrics = step(state, {"inputs": each[:, :-1], "targets": each[:, 1:]})
        found.append(float(metrics["loss"]))
    return found


def test_losses_on_a_gpu_are_those_of_the_processor(gpus):
    with jax.default_matmul_precision("highest"):
        assert np.allclose(losses(gpus[:1]), losses(jax.devices("cpu")[:1]), rtol=1e-4)
