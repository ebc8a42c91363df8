"""Explains an out-of-memory error: bytes of the device by cause, and the changes that free most of them.

XLA's error ─► bytes per device by cause ─► the device's memory ─► the largest three of the possible changes
state: arithmetic on shapes
temporary memory: as compiled, by cause if the program can be inspected (`train/memory_explanation.py`)
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import optax

from jaxpar.errors import Problem
from jaxpar.mesh.devices import allocated_bytes, is_simulated
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import abstract_params, gradient_specs
from jaxpar.sharding.names import Tree, shard_bytes
from jaxpar.step import state as states
from jaxpar.step.frozen_parameters import drop_paths, frozen_paths
from jaxpar.step.memory_error import STATUS, OutOfMemoryError
from jaxpar.step.numerics import Numerics
from jaxpar.units import show_bytes

PARAMETERS, OPTIMIZER, OTHER = "parameters", "optimizer state", "other state"
GRADIENTS, ACTIVATIONS, LOGITS, GATHERED = "gradients", "activations", "logits", "gathered weights"
TEMPORARY = "temporary memory"
FEW = 3  # changes that an error lists
# XLA:GPU's "while trying to allocate 12345 bytes", "1.50GiB" or "[1.50GiB]"; XLA:CPU's "allocating 12345 bytes"
_REQUEST = re.compile(r"allocat\w+ \[?([\d.]+ ?(?:bytes|[KMGT]i?B))")
Causes = Mapping[str, int]  # cause to bytes per device
Change = tuple[str, int]  # a setting, and about how many bytes per device it frees


def explain_state(
    layout: Layout, optimizer: optax.GradientTransformation, error: BaseException, *, offload: bool = False
) -> OutOfMemoryError:
    """Explains that a state could not be made or read; see `explain`."""
    causes = state_bytes(layout, optimizer, offload=offload)
    return explain("the training state", layout, Numerics(offload=offload), causes, error)


def state_bytes(layout: Layout, optimizer: optax.GradientTransformation, *, offload: bool = False) -> dict[str, int]:
    """Returns the bytes per device of a training state by cause; offloaded optimizer state is left out."""
    shapes = states.abstract(layout, optimizer)
    specs = states.specs(layout, shapes)
    causes = {PARAMETERS: _bytes(layout, shapes.params, specs.params)}
    if not offload:
        causes[OPTIMIZER] = _bytes(layout, shapes.optimizer, specs.optimizer)
    causes[OTHER] = sum(
        _bytes(layout, *pair) for pair in ((shapes.model_state, specs.model_state), (shapes.exchange, specs.exchange))
    )
    return causes


def gradient_bytes(layout: Layout, optimizer: optax.GradientTransformation) -> int:
    """Returns the bytes per device of the gradients of all trained parameters."""
    frozen = frozen_paths(layout, optimizer)
    trees = (abstract_params(layout), gradient_specs(layout))
    return _bytes(layout, *(drop_paths(frozen, tree) for tree in trees))


def explain(
    subject: str, layout: Layout, numerics: Numerics, causes: Causes, error: BaseException, *, rows: int = 0
) -> OutOfMemoryError:
    """Returns the error to raise in place of XLA's.

    Args:
      subject: What was allocated: "the training state", "a step".
      layout: The sharding of all arrays.
      numerics: The settings that change memory.
      causes: Bytes per device by cause.
      error: XLA's error.
      rows: Rows of a batch on a device; 0 if no batch is read.
    """
    parts = ", ".join(f"{cause} {show_bytes(size)}" for cause, size in _by_size(causes) if size)
    request = _REQUEST.search(str(error))
    got = f"a device is out of memory: {subject} needs {show_bytes(sum(causes.values()))} per device, {parts}" + (
        f"; XLA could not allocate {_request_bytes(request[1])}" if request else ""
    )
    found = _by_size(dict(possible_changes(layout, numerics, causes, rows=rows)))[:FEW]
    fix = "; ".join(f"{change} frees about {show_bytes(freed)}" for change, freed in found)
    more = "more devices (fsdp, tensor), or a smaller model"
    return OutOfMemoryError(Problem(got, _capacity(layout), f"{fix}; or {more}" if fix else more))


def possible_changes(layout: Layout, numerics: Numerics, causes: Causes, *, rows: int = 0) -> list[Change]:
    """Returns the changes of settings that free memory, with estimates of the bytes per device that each frees.

    Args:
      layout: The sharding of all arrays.
      numerics: The settings that change memory.
      causes: Bytes per device by cause.
      rows: Rows of a batch on a device; 0 if no batch is read.
    """
    size = lambda *names: sum(causes.get(name, 0) for name in names)  # noqa: E731
    data, fsdp, stage = layout.sizes["data"], layout.sizes["fsdp"], layout.parallel.stage
    saved = size(ACTIVATIONS, LOGITS, TEMPORARY)
    changes: list[Change] = []
    if fsdp == 1 and data > 1:
        held = size(PARAMETERS, OPTIMIZER, GRADIENTS)
        changes.append((f"fsdp={data} in place of data={data}", held - held // data))
    if fsdp > 1 and stage < 3:
        gradients = size(GRADIENTS) if stage < 2 else 0
        changes.append(("zero=3", size(GATHERED) + gradients - gradients // fsdp))
    if not numerics.offload and not is_simulated(layout.device_mesh.devices.flat):
        changes.append(("offload=True (train.offload = true)", size(OPTIMIZER)))
    if rows and numerics.remat in ("none", "dots", "all_dots"):
        changes.append(('remat="full" (train.remat = "full")', size(ACTIVATIONS, TEMPORARY)))
    if rows and layout.sizes["pipe"] == 1 and rows % (2 * numerics.accumulate) == 0:
        count = 2 * numerics.accumulate
        changes.append((f"accumulate={count} (train.accumulate = {count})", saved // 2))
    elif rows > 1:
        changes.append(("half of the global batch", saved // 2))
    if rows and numerics.dtype is None:
        changes.append(('precision="bf16" (train.precision = "bf16")', saved // 2))
    return [(change, freed) for change, freed in changes if freed > 0]


def _bytes(layout: Layout, shapes: Tree, specs: Tree) -> int:
    return sum(jax.tree.leaves(jax.tree.map(lambda leaf, spec: shard_bytes(leaf, spec, layout.sizes), shapes, specs)))


def _by_size(sizes: Causes) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda entry: -entry[1])


def _request_bytes(text: str) -> str:
    """Returns the size in XLA's words in those of jaxpar.

    >>> _request_bytes("12345 bytes"), _request_bytes("1.50GiB")
    ('12.06 KiB', '1.50 GiB')
    """
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return show_bytes(int(float(number))) if unit == "bytes" else f"{number} {unit}"


def _capacity(layout: Layout) -> str:
    devices: list[Any] = [
        device for device in layout.device_mesh.devices.flat if device.process_index == jax.process_index()
    ]
    limit = allocated_bytes(devices[0]) if devices else None
    if limit is None:
        return f"the memory of each device holds the state, and what a step computes ({STATUS})"
    in_use = (devices[0].memory_stats() or {}).get("bytes_in_use")
    used = f", of which {show_bytes(in_use)} are in use now" if in_use else ""
    return f"{devices[0].device_kind} has {show_bytes(limit)} for JAX{used}"
