"""A training step as the inspector sees it: every array by the name that the model gives it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax

from jaxpar.exchange.collectives import price
from jaxpar.hlo.attribution import Argument
from jaxpar.hlo.own_share import OwnShare
from jaxpar.hlo.traced_flop import forward_flop
from jaxpar.inspector.subject import Subject, argument
from jaxpar.mesh.chips import find_chip
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.pages.who_holds import cards
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.names import Compute, path_of
from jaxpar.sharding.nnx.hooks import hooked
from jaxpar.sharding.shard_bytes import shard_shape
from jaxpar.step.checks.precision import Matmuls
from jaxpar.step.gradients import Gradients
from jaxpar.step.keyed.loss import shaped
from jaxpar.step.numerics import Numerics
from jaxpar.step.state import State
from jaxpar.units import show_seconds

# in the order in which a state is flattened, which is that of the program's arguments
_ROLES = {"step": "other state", "params": "parameters", "optimizer": "optimizer state", "model_state": "other state",
          "exchange": "other state"}  # fmt: skip


class Inspectable(Protocol):
    """A step that can be inspected; see `jaxpar.step.step.Step`."""

    layout: Layout
    loss: Callable
    numerics: Numerics
    gradients: Gradients
    share: OwnShare | None
    products: Matmuls | None

    @property
    def options(self) -> dict[str, Any]:
        """What XLA is told besides the program."""
        ...

    @property
    def forms(self) -> tuple[str, ...]:
        """The form of each island that was chosen by shapes."""
        ...

    def abstract(self) -> State:
        """Returns the state as shapes, dtypes and shardings."""
        ...

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the shape of a batch array with the sharding that it will have."""
        ...

    def lower(self, state: State, batch: Mapping[str, Any], *, exchanges: int = 0) -> Any:
        """Returns the step lowered for these shapes."""
        ...


def subject(step: Inspectable, batch: Mapping[str, Any], *, exchanges: int = 0) -> Subject:
    """Returns a step lowered for a batch of these shapes, and what its arrays are called.

    Args:
      step: The step.
      batch: Name to anything with shape and dtype.
      exchanges: Which meeting of replicas the step ends with, from 1; 0 for none.
    """
    layout, state = step.layout, step.abstract()
    batch = {name: step.shaped(name, value) for name, value in batch.items()}
    lowered = step.lower(state, batch, exchanges=exchanges)
    platform = layout.on.devices.flat[0].platform
    notes = [*step.forms]
    if platform != "cpu" and jax.default_backend() != "gpu" and step.numerics.dtype:
        if layout.sizes["context"] == 1:
            notes.append(
                "attention is compiled as XLA's own: on a GPU, jaxpar's models take cuDNN's fused kernel in 16 bits, "
                "which keeps no [seq, seq] scores and is faster"
            )
        elif layout.parallel.ways.get("context", "gather") == "gather":  # other ways say what runs their parts
            notes.append(
                "attention is XLA's own: cuDNN's kernel does not take pieces of a sequence, so scores are kept"
            )
    known = (*layout.notes, *notes)
    notes += [note for note in step.layout.notes if note not in known]  # what was known once it was traced
    if step.numerics.remat == "offload" and platform == "cpu":
        notes.append("XLA for processors has one memory: inputs of layers stay where they are, and nothing is freed")
    if step.numerics.offload:
        notes.append("optimizer state in host memory is counted apart from the device's")
    code = _code(step.loss)
    return Subject(
        title=layout.summary(),
        lowered=lowered,
        mesh=layout.on,
        arguments=tuple(
            [*_state(step, state), *(argument(k, "batch", v, v.sharding) for k, v in sorted(batch.items()))]
        ),
        used={
            path: shard_shape(place.leaf.shape, place.used, layout.sizes) for path, place in layout.placements.items()
        }
        | {
            f"model_state/{path}": shard_shape(place.leaf.shape, place.used, layout.sizes)
            for path, place in layout.others.items()
        },
        loss=((code.co_filename, code.co_name),) if code else (),
        model_flop=model_flop(step, batch),
        share=step.share,
        precision=step.numerics.matmuls.compute,
        batch_axes=layout.batch_axes,
        whole=layout.parallel.zero_axes if layout.parallel.stage == 1 else (),
        silent=step.gradients.silent(exchanges=exchanges or step.gradients.meeting(1) * (step.gradients.every == 1)),
        microbatches=step.numerics.accumulate * layout.microbatches,
        updates=step.gradients.updates,
        cards=tuple(cards(layout.placements, layout.sizes)),
        schedule=layout.schedule if layout.sizes["pipe"] > 1 else None,
        notes=(*notes, *(step.products.notes if step.products else ()), *step.gradients.notes, *_agreement(layout)),
        own=True,
        options=step.options,
    )


def _agreement(layout: Layout) -> list[str]:
    """Returns how replicas that step apart agree, and how long that takes on hardware whose links are known."""
    if not layout.agreement:
        return []
    chip = find_chip(layout.on.devices.flat[0].device_kind)
    hardware = HARDWARE.get(chip.key) if chip else None
    if hardware is None:
        return [layout.agreement]
    near = layout.devices // layout.sizes["pipe"] <= hardware.per_node  # `data` is the outermost of the others
    took = price.of_sent(layout.sends(), hardware.inside if near else hardware.between)
    return [f"{layout.agreement}, which takes {show_seconds(took)} (modelled)"]


def model_flop(step: Inspectable, batch: Mapping[str, Any]) -> float:
    """Returns the model's FLOP of a step over all devices: the forward pass, and twice that for the backward pass.

    Of a population that of all its members.
    """
    blueprint, loss = step.layout.blueprint, shaped(step.loss)
    exchange = step.layout.parallel.exchange
    models = exchange.count(step.layout.sizes["data"]) if exchange.same_examples else 1

    def forward(key, batch):
        params, model_state = blueprint.init(key)
        return loss(blueprint.bind(params, model_state, lambda path, value: value, Compute()), batch)

    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}
    key = jax.random.key(0)
    with jax.set_mesh(step.layout.on), sharding_translation(), hooked():  # a model may name mesh axes itself
        return 3.0 * models * forward_flop(forward, key, shapes)


def _state(step: Inspectable, state: Any) -> list[Argument]:
    """Returns the arrays of the state: a parameter by its path, others by that and the part of the state."""
    layout, exchange = step.layout, step.layout.parallel.exchange
    places = {
        "params": (layout.placements, exchange.differ),
        "model_state": (layout.others, exchange.apart),
    }
    found = []
    for part, role in _ROLES.items():
        for keys, leaf in jax.tree_util.tree_leaves_with_path(getattr(state, part)):
            path = path_of(keys)
            known, apart = places.get(part, ({}, False))
            place = known.get(path)
            whole = path if part == "params" else f"{part}/{path}".rstrip("/")
            names = (("replica",) * apart + place.names) if place else ()
            found.append(argument(whole, role, leaf, leaf.sharding, names=names))
    return found


def _code(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", None)
