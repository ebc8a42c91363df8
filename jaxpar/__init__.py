"""Parallel training in JAX: any Flax model, any mesh, one declaration, the same loss as on one device.

    import optax
    import jaxpar as jp

    jp.simulate(8)                                                  # leave out on eight GPUs
    model = lambda rngs: jp.Decoder(jp.DecoderSettings(seq=64), rngs=rngs)
    layout = jp.compose(model, jp.Parallel(data=2, fsdp=2, tensor=2))
    optimizer, text = optax.adamw(3e-3), jp.open_data(jp.Data(seq=64))
    state = jp.init_state(layout, optimizer)
    step = jp.train_step(layout, jp.next_token, optimizer)
    for i in range(40):
        state, metrics = step(state, text.batch(i, 16))

What is made of what, in this order:

    model    any Flax model: a function of rngs, jp.linen(...), jp.nnx(...); jp.Decoder, jp.ViT are there already
             inside it: jp.constrain names dims, jp.attention is split over them, jp.pipelined stacks layers
             jp.adapted(model, ...) adds low-rank adapters, jp.merged(...) adds them to the matrices
    layout   jp.compose(model, jp.Parallel(...)): where every array lives, and why; print(layout.explain())
             jp.Pipeline, jp.schedule: stages and their table; jp.Exchange: how replicas agree
    state    jp.init_state(layout, optimizer): every array made on the devices that keep it; jp.freeze leaves some alone
             jp.save(path, state), jp.restore(path, step): under any other layout too
    step     jp.train_step(layout, loss, optimizer): one compiled program; losses jp.next_token, jp.classify, your own
             jp.fit(step, data, steps=200, batch=16, run="runs/mine"): saves, resumes and evaluates on the way

Before anything runs: jp.inspect(step, batch) says what XLA made of it, also for jp.target_devices("h100:8x8"),
jp.assert_fits and jp.assert_collectives hold it to that, and jp.plan(step, batch, devices=64), or of a job, finds the
fastest layout.
Input that is wrong raises jp.JaxparError: what was got, the rule, and the way out. What a layout, a plan, a schedule or
a report is, a notebook shows as a picture.

Names are resolved when they are first used, so that importing jaxpar costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "JaxparError": "jaxpar.errors",
    "simulate": "jaxpar.mesh.devices",
    "Parallel": "jaxpar.parallel.declare",
    "Pipeline": "jaxpar.parallel.pipe",
    "Exchange": "jaxpar.exchange.table",
    "pipelined": "jaxpar.models.stack",
    "compose": "jaxpar.parallel.compose",
    "linen": "jaxpar.parallel.compose",
    "nnx": "jaxpar.parallel.compose",
    "adapted": "jaxpar.parallel.compose",
    "merged": "jaxpar.parallel.compose",
    "freeze": "jaxpar.optim.freeze",
    "constrain": "jaxpar.models.named",
    "attention": "jaxpar.models.islands",
    "init_state": "jaxpar.step.state",
    "train_step": "jaxpar.step.step",
    "next_token": "jaxpar.step.losses",
    "classify": "jaxpar.step.losses",
    "inspect": "jaxpar.inspector.report",
    "assert_collectives": "jaxpar.inspector.budget",
    "assert_fits": "jaxpar.inspector.budget",
    "target_devices": "jaxpar.mesh.absent",
    "Data": "jaxpar.data.spec",
    "open_data": "jaxpar.data.sources",
    "fit": "jaxpar.train.doors.fit",
    "save": "jaxpar.train.doors.saving",
    "restore": "jaxpar.train.doors.saving",
    "plan": "jaxpar.plan",
    "schedule": "jaxpar.pipeline.draw.shown",
    "Decoder": "jaxpar.models.decoder",
    "DecoderSettings": "jaxpar.models.settings.decoder",
    "ViT": "jaxpar.models.vit",
    "ViTSettings": "jaxpar.models.settings.vit",
}

__all__ = sorted([*_MODULES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    made = import_module(_MODULES[name])
    return made if made.__name__ == f"jaxpar.{name}" else getattr(made, name)  # the room `plan` can be called itself


def __dir__():
    return __all__
