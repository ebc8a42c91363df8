"""The protocol of a planned model, and its implementation for decoders by formulas; others: `traced_model.py`."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxpar.mesh.collective import Collective
from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import legal_layouts
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory, memory
from jaxpar.plan.model.layer_bytes import host_bytes, layer_bytes
from jaxpar.plan.model.shape import Shape, count_parameters, divides_arrays, masked_flop, step_flop
from jaxpar.plan.model.splits import AXES
from jaxpar.plan.model.state_bytes import JAXPAR, Recipe
from jaxpar.plan.techniques.table import collectives, unused_axes
from jaxpar.plan.time import StepTime, step_time


class Model(Protocol):
    """A model that a search can plan. Fields of candidates may be arrays; all results are then arrays too."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        ...

    @property
    def layers(self) -> int:
        """Number of blocks that pipeline stages can share."""
        ...

    @property
    def unit(self) -> tuple[str, int]:
        """The unit of throughput, and its number per example: ("tokens", 8192)."""
        ...

    @property
    def has_published_runs(self) -> bool:
        """Whether there are published runs of such models, from which an expected error follows."""
        ...

    @property
    def named_axes(self) -> tuple[str, ...]:
        """Axes of `context` and `tensor` that split dims as the model names them: no specs are found for these."""
        ...

    def step_flop(self, rows: int) -> float:
        """Returns the FLOP of a step over this many rows, without recomputation: backward is twice forward."""
        ...

    def masked_flop(self, rows: int) -> float:
        """Returns the FLOP of a step that the attention mask drops; 0 if unknown."""
        ...

    def exclusions(self, choices: Choices) -> tuple[str, ...]:
        """Returns the exclusions of the search, each with the reason or the option that includes it."""
        ...

    def legal(self, *, devices: int, rows: int, choices: Choices) -> Candidate:
        """Returns all layouts for a number of devices and of rows per step, as arrays."""
        ...

    def storable(self, candidate: Candidate) -> Any:
        """Whether jaxpar's program can store the parameters in equal shards."""
        ...

    def costs(self, software: SoftwareModel) -> "LayoutCosts":
        """Returns the costs of layouts if this program trains the model."""
        ...


class LayoutCosts(Protocol):
    """Bytes, seconds and collectives of layouts of one model, trained by one program."""

    @property
    def attention(self) -> str:
        """The assumed attention implementation as text; "" if unknown."""
        ...

    @property
    def largest_layer(self) -> float:
        """Bytes of the largest layer: its training state, and its residuals for one row."""
        ...

    def memory(self, candidate: Candidate) -> Memory:
        """Returns the bytes of the fullest device, by cause."""
        ...

    def time(self, candidate: Candidate, hardware: Hardware) -> StepTime:
        """Returns the seconds of a step, by cause."""
        ...

    def collectives(self, candidate: Candidate) -> list[Collective]:
        """Returns the collectives of a step of one layout, in the form of a ledger."""
        ...

    def host_bytes(self, candidate: Candidate) -> float:
        """Returns the bytes of layer inputs that a device keeps in host memory during a step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder, planned by the formulas of `plan/memory.py` and `plan/time.py`.

    Attributes:
      shape: Layers and widths.
      recipe: Bytes per parameter of the training state.
      no_kernel_reason: Reason why blocks of plain JAX, not the software's kernel, compute ring or ulysses attention;
        "" if the kernel does.
    """

    shape: Shape
    recipe: Recipe = JAXPAR
    no_kernel_reason: str = ""

    has_published_runs = True
    named_axes = AXES  # a decoder names its dims

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.shape.parameters

    @property
    def layers(self) -> int:
        """Number of blocks that pipeline stages can share."""
        return self.shape.layers

    @property
    def unit(self) -> tuple[str, int]:
        """Tokens, and the tokens of a row."""
        return "tokens", self.shape.seq

    def step_flop(self, rows: int) -> float:
        """Returns the FLOP of a step; see `jaxpar.plan.model.shape`."""
        return float(step_flop(self.shape, rows))

    def masked_flop(self, rows: int) -> float:
        """Returns the FLOP of a step that a causal mask drops."""
        return float(masked_flop(self.shape, rows))

    def exclusions(self, choices: Choices) -> tuple[str, ...]:
        """Returns axes that no layout has, and schedules that the search does not try."""
        names = ", ".join(name for name in LIBRARY if name not in choices.schedules)
        schedules = f"schedules {names}: --schedules all tries them too, in about three times the time"
        return (*unused_axes(self.shape), *[schedules] * bool(names))

    def legal(self, *, devices: int, rows: int, choices: Choices) -> Candidate:
        """Returns all layouts; see `jaxpar.plan.enumeration.legal_layouts`."""
        return legal_layouts(self.shape, devices=devices, rows=rows, choices=choices)

    def storable(self, candidate: Candidate) -> Any:
        """Whether stages and shards of the training state divide the parameters; see `plan/model/shape.py`."""
        return divides_arrays(self.shape, candidate)

    def costs(self, software: SoftwareModel) -> "TransformerCosts":
        """Returns the costs of layouts: frozen weights send no gradients, and the kernel may not support the model."""
        wire = software.wire[0], software.wire[1] * self.shape.trained
        no_kernel_reason = self.no_kernel_reason or "the software has no kernel for them" * (
            software.ring_kernel is None
        )
        return TransformerCosts(
            shape=self.shape,
            recipe=self.recipe,
            software=replace(software, ring_kernel=None if no_kernel_reason else software.ring_kernel, wire=wire),
            no_kernel_reason=no_kernel_reason,
        )


@dataclass(frozen=True, kw_only=True)
class TransformerCosts:
    """Bytes, seconds and collectives of layouts of a decoder.

    Attributes:
      shape: Layers and widths.
      recipe: Bytes per parameter of the training state.
      software: The program; it has a kernel for ring or ulysses attention only if that supports the model.
      no_kernel_reason: Reason why blocks of plain JAX compute it; "" if a kernel does.
    """

    shape: Shape
    recipe: Recipe
    software: SoftwareModel
    no_kernel_reason: str

    @property
    def attention(self) -> str:
        """The kernels that run attention, and whether they save the scores."""
        if self.software.attention == "unfused":
            return "XLA's own, which keeps the scores once (jax 0.10 keeps them twice between the passes: not counted)"
        if self.software.split_sequences is None:
            return "cuDNN's kernel, which keeps no scores"
        pieces = f"blocks of plain JAX ({self.no_kernel_reason})" if self.no_kernel_reason else "the kernel, in parts"
        return (
            "cuDNN's kernel, which keeps no scores; where context cuts sequences XLA's own, which keeps them, for "
            f"gathered keys, and for pieces that travel {pieces}"
        )

    @property
    def largest_layer(self) -> float:
        """Bytes of the training state and residuals of a block, or of the state of an embedding or head."""
        count = count_parameters(self.shape)
        block = self.recipe.total * count.layer + float(layer_bytes(self.shape, Candidate(), self.software)[1])
        return max(block, self.recipe.total * count.embedding, self.recipe.total * count.head)

    def memory(self, candidate: Candidate) -> Memory:
        """Returns the bytes of the fullest device; see `jaxpar.plan.memory`."""
        return memory(self.shape, candidate, self.software, self.recipe)

    def time(self, candidate: Candidate, hardware: Hardware) -> StepTime:
        """Returns the seconds of a step; see `jaxpar.plan.time`."""
        return step_time(self.shape, candidate, hardware, self.software)

    def collectives(self, candidate: Candidate) -> list[Collective]:
        """Returns the collectives of a step; see `jaxpar.plan.techniques.table`."""
        return collectives(self.shape, candidate, self.software)

    def host_bytes(self, candidate: Candidate) -> float:
        """Returns the bytes of layer inputs that a device keeps in host memory during a step."""
        return float(host_bytes(self.shape, candidate))
