"""Parallel training in JAX: any Flax model, any mesh, one declaration, the same loss as on one device.

    import optax
    import jaxpar as jp

    jp.simulate(8)                                                  # leave out on eight GPUs
    model = lambda rngs: jp.Decoder(jp.DecoderConfig(seq=64), rngs=rngs)
    layout = jp.compose(model, jp.Parallel(data=2, fsdp=2, tensor=2))
    optimizer, text = optax.adamw(3e-3), jp.open_data(jp.Data(seq=64))
    state = jp.init_state(layout, optimizer)
    step = jp.train_step(layout, jp.next_token_loss, optimizer)
    for i in range(40):
        state, metrics = step(state, text.batch(i, 16))

What is made of what, in this order:

    model    any Flax model: a function of rngs, jp.from_linen(...), jp.from_nnx(...); or the built-in jp.Decoder,
             jp.ViT in a model, jp.constrain names dims, jp.attention shards attention, jp.mixture brings tokens to
             their experts, jp.pipelined marks the layers to split; jp.add_lora(model, ...) adds low-rank adapters,
             jp.merge_lora(...) adds them to the matrices
    layout   jp.compose(model, jp.Parallel(...)): the sharding of every array, and why; print(layout.explain())
             jp.Pipeline, jp.schedule: stages and their table; jp.Exchange: how replicas exchange gradients
    state    jp.init_state(layout, optimizer): initializes every array on its devices; jp.freeze excludes parameters
             jp.save(path, state), jp.restore(path, step): under any other layout too
             jp.from_huggingface(folder, model, rules): weights for jp.init_state(..., params=), in your own model;
             jp.to_huggingface(...) writes the folder again
             jp.model(layout, state), or jp.model("runs/mine"): your own Flax model with the trained parameters
    step     jp.train_step(layout, loss, optimizer): one compiled program; losses jp.next_token_loss,
             jp.classification_loss, jp.dpo_loss (of a model with jp.add_reference), your own
             jp.fit(step, data, steps=200, batch=16, run="runs/mine"): saves, resumes
             and evaluates on the way

Before anything runs: jp.inspect(step, batch) reports the program that XLA compiled, also for
jp.target_devices("h100:8x8"), jp.assert_fits and jp.assert_collectives turn its numbers into tests, and
jp.plan(step, batch, devices=64), or of a job, finds the fastest layout.
Wrong input raises jp.JaxparError: what was got, the rule, a fix. Notebooks show layouts, plans, schedules, reports.

Names are resolved on first use, so that importing jaxpar is cheap.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "JaxparError": "jaxpar.errors",
    "simulate": "jaxpar.mesh.devices",
    "Parallel": "jaxpar.parallel.declaration",
    "Pipeline": "jaxpar.parallel.declaration",
    "Exchange": "jaxpar.exchange.table",
    "pipelined": "jaxpar.models.stack",
    "compose": "jaxpar.train.api.train_step",
    "from_linen": "jaxpar.parallel.compose",
    "from_nnx": "jaxpar.parallel.compose",
    "add_lora": "jaxpar.parallel.compose",
    "merge_lora": "jaxpar.parallel.compose",
    "freeze": "jaxpar.optim.wrappers",
    "constrain": "jaxpar.models.dim_names",
    "attention": "jaxpar.models.islands",
    "mixture": "jaxpar.models.experts",
    "init_state": "jaxpar.step.init_state",
    "model": "jaxpar.step.model",
    "train_step": "jaxpar.train.api.train_step",
    "next_token_loss": "jaxpar.step.losses",
    "classification_loss": "jaxpar.step.losses",
    "dpo_loss": "jaxpar.step.preference_loss",
    "add_reference": "jaxpar.parallel.compose",
    "inspect": "jaxpar.inspector.report",
    "assert_collectives": "jaxpar.inspector.budget",
    "assert_fits": "jaxpar.inspector.budget",
    "target_devices": "jaxpar.mesh.absent_gpus",
    "Data": "jaxpar.data.spec",
    "open_data": "jaxpar.data.sources",
    "fit": "jaxpar.train.api.fit",
    "save": "jaxpar.train.api.saving",
    "restore": "jaxpar.train.api.saving",
    "from_huggingface": "jaxpar.train.api.huggingface",
    "to_huggingface": "jaxpar.train.api.huggingface",
    "plan": "jaxpar.plan",
    "find_specs": "jaxpar.specs.find",
    "schedule": "jaxpar.pipeline.draw.notebook",
    "Decoder": "jaxpar.models.decoder",
    "DecoderConfig": "jaxpar.models.settings.decoder",
    "ViT": "jaxpar.models.classifiers",
    "ViTConfig": "jaxpar.models.settings.classifiers",
}

__all__ = sorted([*_MODULES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    module = import_module(_MODULES[name])
    return module if module.__name__ == f"jaxpar.{name}" else getattr(module, name)  # `plan` is callable


def __dir__():
    return __all__
