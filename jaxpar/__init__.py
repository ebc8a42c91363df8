"""jaxpar: parallel training in JAX. Any Flax model, any mesh, one declaration.

    import jaxpar as jp

Names are resolved when they are first used, so that importing jaxpar costs nothing.
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULES = {
    "JaxparError": "jaxpar.errors",
    "simulate": "jaxpar.mesh.devices",
    "Parallel": "jaxpar.parallel.declare",
    "Pipeline": "jaxpar.parallel.pipe",
    "Exchange": "jaxpar.exchange.table",
    "pipelined": "jaxpar.models.stack",
    "Layout": "jaxpar.parallel.layout",
    "compose": "jaxpar.parallel.compose",
    "linen": "jaxpar.parallel.compose",
    "nnx": "jaxpar.parallel.compose",
    "adapted": "jaxpar.parallel.compose",
    "merged": "jaxpar.parallel.compose",
    "freeze": "jaxpar.optim.freeze",
    "constrain": "jaxpar.models.named",
    "attention": "jaxpar.models.islands",
    "init_state": "jaxpar.step.state",
    "State": "jaxpar.step.state",
    "train_step": "jaxpar.step.step",
    "Precision": "jaxpar.models.settings.computing",
    "next_token": "jaxpar.step.losses",
    "classify": "jaxpar.step.losses",
    "inspect": "jaxpar.inspector.report",
    "assert_collectives": "jaxpar.inspector.budget",
    "assert_fits": "jaxpar.inspector.budget",
    "target_devices": "jaxpar.mesh.absent",
    "Data": "jaxpar.data.spec",
    "open_data": "jaxpar.data.sources",
    "Run": "jaxpar.train.loop",
    "run": "jaxpar.train.loop",
    "Decoder": "jaxpar.models.decoder",
    "DecoderSettings": "jaxpar.models.settings.decoder",
    "ViT": "jaxpar.models.vit",
    "ViTSettings": "jaxpar.models.settings.vit",
}

__all__ = sorted([*_MODULES, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__():
    return __all__
