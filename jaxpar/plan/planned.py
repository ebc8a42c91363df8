"""The protocol of a planned model; a transformer answers with formulas, any other is traced (`traced.py`)."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.parallel.declare import Parallel
from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.choices import Choices
from jaxpar.plan.enumerate import legal
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory, memory
from jaxpar.plan.model.layer_bytes import host_bytes, layer_bytes
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import JAXPAR, Recipe
from jaxpar.plan.techniques.asked import collectives, without
from jaxpar.plan.time import StepTime, step_time


class Model(Protocol):
    """A model as a search weighs it. Fields of candidates may be arrays, and so are then all numbers."""

    @property
    def parameters(self) -> int:
        """Parameters, all of them."""
        ...

    @property
    def layers(self) -> int:
        """Blocks that stages of a pipeline can share."""
        ...

    @property
    def unit(self) -> tuple[str, int]:
        """The unit of throughput, and how many an example has: ("tokens", 8192)."""
        ...

    @property
    def published(self) -> bool:
        """Whether runs of such models are published, by which predictions of it can be judged."""
        return False

    def step_flop(self, rows: int) -> float:
        """Returns the FLOP of a step over so many rows, nothing computed twice: backward is twice forward."""
        ...

    def masked_flop(self, rows: int) -> float:
        """Returns the FLOP of attention under a mask among them; 0 where the model does not tell."""
        return 0.0

    def attention(self, software: SoftwareModel) -> str:
        """Returns how attention is taken to run, in words; "" where nothing is known of it."""
        ...

    def left_out(self, choices: Choices) -> tuple[str, ...]:
        """Returns what no layout of this model's search has, each with the reason or the way to it."""
        ...

    def legal(self, *, devices: int, rows: int, choices: Choices) -> Candidate:
        """Returns all layouts for so many devices and rows of a step, as arrays."""
        ...

    def storable(self, candidate: Candidate) -> Any:
        """Returns whether stages of jaxpar's program can store equal parts of the layers."""
        ...

    def memory(self, candidate: Candidate, software: SoftwareModel) -> Memory:
        """Returns the bytes of the fullest device, by cause."""
        ...

    def time(self, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
        """Returns the seconds of a step, by cause."""
        ...

    def collectives(self, candidate: Candidate, software: SoftwareModel) -> list[Collective]:
        """Returns the collectives of a step of one layout, those that techniques name, as a ledger has them."""
        ...

    def on_host(self, candidate: Candidate) -> float:
        """Returns the bytes of a device's layers that are in host memory while a step runs."""
        ...

    def largest(self, software: SoftwareModel) -> float:
        """Returns the bytes of the largest layer: its training state, and what it keeps of one row."""
        ...


BYTES = 4  # of a parameter between steps
REPLICATED = Parallel().replicate_above  # bytes up to which a parameter that shards do not divide stays whole


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder, by the formulas of `plan/memory.py` and `plan/time.py`.

    Attributes:
      shape: Its widths.
      recipe: Bytes per parameter of the training state.
      in_blocks: Why blocks of plain JAX run parts of attention where pieces travel, though the software has a kernel
        for them; "" where that runs them.
    """

    shape: Shape
    recipe: Recipe = JAXPAR
    in_blocks: str = ""

    @property
    def parameters(self) -> int:
        """Parameters, all of them."""
        return self.shape.parameters

    @property
    def layers(self) -> int:
        """Blocks that stages of a pipeline can share."""
        return self.shape.layers

    @property
    def unit(self) -> tuple[str, int]:
        """Tokens, and how many a row has."""
        return "tokens", self.shape.seq

    @property
    def published(self) -> bool:
        """True: all published runs are of decoders."""
        return True

    def step_flop(self, rows: int) -> float:
        """Returns the FLOP of a step; see `Shape.step_flop`."""
        return float(self.shape.step_flop(rows))

    def masked_flop(self, rows: int) -> float:
        """Returns the FLOP that a causal mask drops; see `Shape.masked_flop`."""
        return float(self.shape.masked_flop(rows))

    def attention(self, software: SoftwareModel) -> str:
        """Returns whose kernels run attention, and what they keep."""
        if software.attention == "unfused":
            return "XLA's own, which keeps the scores"
        if software.pieces is None:
            return "cuDNN's kernel, which keeps no scores"
        far = f"blocks of plain JAX ({why})" if (why := self._why_blocks(software)) else "the kernel, in parts"
        return (
            "cuDNN's kernel, which keeps no scores; where context cuts sequences XLA's own, which keeps them, for "
            f"gathered keys, and for pieces that travel {far}"
        )

    def _why_blocks(self, software: SoftwareModel) -> str:
        return self.in_blocks or "the software has no kernel for them" * (software.parts is None)

    def _run(self, software: SoftwareModel) -> SoftwareModel:
        """Returns the software as it runs this model."""
        sent = software.wire[0], software.wire[1] * self.shape.trained
        return replace(software, parts=None if self.in_blocks else software.parts, wire=sent)

    def left_out(self, choices: Choices) -> tuple[str, ...]:
        """Returns axes that no layout has, and schedules that are not weighed."""
        others = ", ".join(name for name in LIBRARY if name not in choices.schedules)
        compared = f"schedules {others}: --schedules all weighs them too, in about three times the time"
        return (*without(self.shape), *[compared] * bool(others))

    def legal(self, *, devices: int, rows: int, choices: Choices) -> Candidate:
        """Returns all layouts; see `jaxpar.plan.enumerate.legal`."""
        return legal(self.shape, devices=devices, rows=rows, choices=choices)

    def storable(self, candidate: Candidate) -> Any:
        """Returns whether stages and shards of the training state divide a dim of all large parameters.

        Stages divide the layers, or else the stream. Shards divide any dim but that of the layers, together with
        `tensor` on those that it splits: JAX stores no unequal shards, and `compose` refuses large parameters whole.
        """
        stages = np.equal(self.shape.layers % candidate.pipe, 0) | np.equal(self.shape.dim % candidate.pipe, 0)
        cut, anything = True, False  # what large arrays need; an axis that cuts nothing is refused too
        for size, dims in self.shape.stored:
            fits = [np.equal(dim % (candidate.shards * (candidate.tensor if by else 1)), 0) for dim, by in dims]
            one = np.any(np.broadcast_arrays(*fits), axis=0)
            anything = anything | one
            cut = cut & (one | (size * BYTES <= REPLICATED))
        return stages & ((cut & anything) | np.equal(candidate.shards, 1))

    def memory(self, candidate: Candidate, software: SoftwareModel) -> Memory:
        """Returns the bytes of the fullest device; see `jaxpar.plan.memory`."""
        return memory(self.shape, candidate, self._run(software), self.recipe)

    def time(self, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
        """Returns the seconds of a step; see `jaxpar.plan.time`."""
        return step_time(self.shape, candidate, hardware, self._run(software))

    def collectives(self, candidate: Candidate, software: SoftwareModel) -> list[Collective]:
        """Returns the collectives of a step; see `jaxpar.plan.techniques.asked`."""
        return collectives(self.shape, candidate, self._run(software))

    def on_host(self, candidate: Candidate) -> float:
        """Returns the bytes of a device's layers that are in host memory while a step runs."""
        return float(host_bytes(self.shape, candidate))

    def largest(self, software: SoftwareModel) -> float:
        """Returns the bytes of a block with what it keeps, or of an embedding."""
        shape = self.shape
        block = self.recipe.total * shape.layer_parameters + float(layer_bytes(shape, Candidate(), software)[1])
        return max(block, *(self.recipe.total * ends for ends in (shape.embedding_parameters, shape.head_parameters)))
