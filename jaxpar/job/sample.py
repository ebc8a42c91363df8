"""A trained run is asked for text."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpar.checkpoint import Store
from jaxpar.data.tokens import Text
from jaxpar.errors import refuse
from jaxpar.job.file.parse import load
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.mesh.devices import visible
from jaxpar.optim import chain
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declare import Parallel
from jaxpar.sharding.names import Compute
from jaxpar.step import state


def sample(
    folder: str | Path, prompt: str, *, tokens: int, temperature: float, seed: int, allow_import: bool = False
) -> str:
    """Returns the prompt and what the decoder of a run makes of it, on one device.

    The whole window is computed anew for each token: simple, and fast enough for a look.

    Args:
      folder: The run folder.
      prompt: What the text begins with.
      tokens: How many to add.
      temperature: Divides the logits; 0 takes the likeliest token.
      seed: Of the sampling.
      allow_import: Whether the run may name Python objects from anywhere.

    Raises:
      JaxparError: If the folder holds no trained decoder, or a number makes no sense.
    """
    folder = Path(folder)
    if not (folder / "job.toml").exists():
        raise refuse(
            f"{folder} holds no job.toml",
            rule="text is sampled from the folder of a run",
            fix="jaxpar train configs/quickstart.toml",
        )
    if tokens < 1 or not 0 <= temperature <= 1e6 or not 0 <= seed < 2**31:
        raise refuse(
            f"tokens {tokens}, temperature {temperature}, seed {seed}",
            rule="tokens is at least 1, temperature and seed at least 0, and none of them huge",
            fix="--tokens 200 --temperature 0.8 --seed 0",
        )
    job = load(folder / "job.toml", allow_import=allow_import)
    if not job.data.is_text:
        raise refuse(
            f"{folder} was trained on {job.data.source}",
            rule="text is sampled from a model of text",
            fix="a run with data.source = 'text'",
        )
    layout = compose(resolve_model(job, resolve_loss(job)), Parallel(), visible()[:1])
    store = Store(folder / "checkpoints", job.checkpoint, say=partial(print, file=sys.stderr), owned=False)
    alone = SingleDeviceSharding(visible()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone),
        state.abstract(layout, chain.build(job.optimizer, job.train.steps)),
    )
    trained, _ = store.restore(like)
    text = Text(folder / "data", job.data.tokenizer)
    ids, known = text.encode(prompt), text.size
    if not ids:
        raise refuse("an empty prompt", rule="text begins with something", fix='--prompt "\\n"')

    @jax.jit
    def next_token(params, model_state, window, last, key):
        model = layout.blueprint.bind(params, model_state, lambda path, value: value, Compute(train=False))
        logits = model(window[None])[0, last, :known].astype(jnp.float32)  # what is above is no token of the text
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits))

    length = job.data.seq
    for index in range(tokens):
        recent = ids[-length:]
        window = np.zeros((length,), np.int32)
        window[: len(recent)] = recent
        key = jax.random.fold_in(jax.random.key(seed), index)
        ids.append(int(next_token(trained.params, trained.model_state, window, len(recent) - 1, key)))
    return text.decode(ids)
