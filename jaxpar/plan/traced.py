"""Any model as a plan sees it: traced once on shapes, shared by data and fsdp, and by techniques that are added.

    matmuls       2 FLOP per multiplication of every matmul and convolution, going forward; twice that going backward
    elementwise   what the backward pass reads was written and read once going forward, and is read, and its gradient
                  written and read, going backward: 5 times its bytes; once more to and fro where it is computed again
    activations   what `jax.vjp` keeps that grows with the batch, as the remat policy leaves it
    working       what one block computes again; with ZeRO-3, twice the largest piece that is gathered at once, or all
                  that is gathered where nothing is computed again: it is kept for the backward pass

What XLA fuses away, or keeps although nobody asked it to, is not in it: `--verify` compiles.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.choices import Choices
from jaxpar.plan.enumerate import every, pick
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory, by_stage
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.model.tracing import Kind, Trace
from jaxpar.plan.techniques.asked import added_bytes, around, collectives, of_step, without
from jaxpar.plan.techniques.base import Work, divisors
from jaxpar.plan.techniques.sharding_bytes import gathered_for_a_step, while_made
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.plan.time import StepTime, optimizer

FORWARD, BACKWARD = 2, 3  # reads and writes of what the backward pass reads
AGAIN: Mapping[str, tuple[Kind, ...]] = {
    # kinds of matmuls that each remat policy computes again: jax.checkpoint_policies keep no convolutions
    "none": (),
    "all_dots": ("convolution",),
    "dots": ("convolution", "batched"),
    "full": ("convolution", "batched", "weights"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """A model of which nothing is known but what tracing it shows.

    Attributes:
      name: What the user calls it.
      shards: Sizes of `fsdp` and of the further axes to the parameters that a device holds; of ones, all.
      beside: The same sizes to the bytes of other state that a device holds.
      refused: Such sizes that the model does not take, and why.
      piece: Parameters of the largest piece that is gathered at once: a parameter, or a layer of a stack.
      recipe: Bytes per parameter of the training state.
      trace: Its matmuls, and what it keeps.
      itemsize: Bytes of what matmuls run in: 2 or 4.
      sums: Whether the loss is a sum with a count, which microbatches need.
      axes: Further axes, of techniques that are added to jaxpar's own and have something to split here.
      dims: Names of dims of its parameters to what divides all dims of that name.
      holding: Names of dims to the parameters in all arrays that have such a dim.
    """

    name: str
    shards: Mapping[tuple[int, ...], int]
    beside: Mapping[tuple[int, ...], int]
    refused: Mapping[tuple[int, ...], str]
    piece: int
    recipe: Recipe
    trace: Trace
    itemsize: int
    sums: bool
    axes: tuple[str, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    holding: Mapping[str, int] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Parameters, all of them."""
        return self.shards[(1,) * (1 + len(self.axes))]

    @property
    def layers(self) -> int:
        """One: a pipeline is planned for decoders."""
        return 1

    @property
    def unit(self) -> tuple[str, int]:
        """Examples."""
        return "examples", 1

    @property
    def published(self) -> bool:
        """False: all published runs are of decoders."""
        return False

    def step_flop(self, rows: int) -> float:
        """Returns the FLOP of its matmuls and convolutions, three times over for forward and backward."""
        return 3.0 * rows * sum(each.flop * each.times for each in self.trace.matmuls)

    def masked_flop(self, rows: int) -> float:
        """Returns 0: what a mask drops is not known of a traced model."""
        return 0.0

    def attention(self, software: SoftwareModel) -> str:
        """Returns what tracing shows: matmuls, and what is kept between them."""
        return "as traced, without a GPU's fused kernel" if any(p.kind == "batched" for p in self.trace.matmuls) else ""

    def left_out(self, choices: Choices) -> tuple[str, ...]:
        """Returns what the model does not take, and the axes that it has no use for."""
        remats = [name for name in AGAIN if name not in self.trace.kept]
        return (
            *without(self),
            *["microbatches: the loss is a mean; one that returns (sum, count) adds up over them"] * (not self.sums),
            *[f"remat {', '.join(remats)}: {self.name} marks no blocks for it"] * bool(remats),
            *self.refused.values(),
        )

    def storable(self, candidate: Candidate) -> Any:
        """Returns that no layout cuts layers."""
        return np.equal(candidate.pipe, 1)

    def legal(self, *, devices: int, rows: int, choices: Choices) -> Candidate:
        """Returns all layouts of data, fsdp and further axes, with the remat policies that the model can place.

        Raises:
          JaxparError: If the devices do not divide the examples.
        """
        remats = tuple(name for name in choices.remats if name in self.trace.kept)
        found = every(self, devices=devices, rows=rows, choices=replace(choices, remats=remats))
        if found is None:
            replicas = " x ".join(axis for axis in batch_axes() if axis in TECHNIQUES)
            raise refuse(
                f"{devices:,} devices for {rows} examples",
                rule=f"{replicas}, the devices, divides the examples of the global batch",
                fix=f"--devices {max(n for n in divisors(rows) if n <= devices)}, or train.global_batch = "
                f"{-(-rows // devices) * devices}",
            )
        sizes, which = self._sizes(found)
        taken = np.array([each in self.shards for each in sizes])[which]
        return pick(found, taken & (self.sums | (found.microbatches == 1)))

    def memory(self, candidate: Candidate, software: SoftwareModel) -> Memory:
        """Returns the bytes of a device, by cause."""
        own, whole = self._software(software), self._held(candidate, whole=True)
        shard = self._held(candidate, whole=False)
        state = [self._held(candidate, whole=each, of=self.beside) for each in (True, False)]
        others = {"state": np.where(np.equal(candidate.zero, 0), *state)} if any(self.beside.values()) else {}
        parameters, gradients, moments = by_stage(whole, shard, candidate, self.recipe)
        kept, everything = self._kept(candidate), candidate.microbatch * self.trace.kept["none"]
        piece = 2.0 * np.equal(candidate.zero, 3) * self.piece
        at_once = gathered_for_a_step(candidate, self.recipe) | own.keeps_gathered(candidate)
        gathered = self.itemsize * np.where(at_once, whole, piece)
        return (
            Memory(
                parameters=parameters,
                gradients=while_made(gradients, candidate, own, self.recipe),
                optimizer=moments,
                activations=kept,
                logits=0.0 * kept,
                working=(everything - kept) / max(self.trace.blocks, 1) + gathered,
            )
            .plus(others)
            .plus(added_bytes(self, candidate, own, self.recipe))
        )

    def time(self, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
        """Returns the seconds of a step, by cause."""
        software, rows, count = self._software(software), candidate.microbatch, candidate.microbatches
        forward = {kind: self._seconds(kind, rows, hardware) for kind in AGAIN["full"]}
        once, everything = sum(forward.values()), rows * self.trace.kept["none"]
        again = self._by_remat(candidate, lambda name: sum(forward[kind] for kind in AGAIN[name]))
        repeated = hardware.stream(FORWARD * (everything - self._kept(candidate)))
        elementwise = hardware.stream((FORWARD + BACKWARD) * everything)
        held = self._held(candidate, whole=True)
        sums = np.where(np.greater(count, 1), hardware.stream(software.accumulate * held), 0.0)
        compute = count * (3 * once + again + repeated + elementwise + sums)
        nothing = 0.0 * compute
        work = Work(parameters=held, layers=self.trace.blocks, compute=compute)
        return StepTime(
            matmuls=3 * count * once,
            attention=nothing,
            elementwise=count * (elementwise + sums),
            recompute=count * (again + repeated),
            **{cause: nothing + more for cause, more in of_step(self, candidate, hardware, software).items()},
            **around(work, candidate, hardware, software),
            bubble=nothing,
            send=nothing,
            stragglers=compute * hardware.waits(candidate.devices),
            optimizer=optimizer(held, candidate, hardware, software),
        ).times(hardware.pace)

    def collectives(self, candidate: Candidate, software: SoftwareModel) -> list[Collective]:
        """Returns the collectives of a step of one layout that techniques name."""
        return collectives(self, candidate, self._software(software))

    def on_host(self, candidate: Candidate) -> float:
        """Returns 0.0: of a traced model nothing is offloaded."""
        return 0.0

    def largest(self, software: SoftwareModel) -> float:
        """Returns the bytes of the largest piece's state, and of what a block keeps of one row."""
        return self.recipe.total * self.piece + self.trace.kept["none"] / max(self.trace.blocks, 1)

    def _software(self, software: SoftwareModel) -> SoftwareModel:
        """Returns how it is run: what travels has the size of what matmuls run in."""
        return replace(software, wire=(float(self.itemsize),) * 2)

    def _sizes(self, candidate: Candidate) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """Returns the sizes of fsdp and of further axes that are met, and which of them each candidate has."""
        columns = np.broadcast_arrays(*(candidate.size(axis) for axis in ("fsdp", *self.axes)))
        met, which = np.unique(np.stack([each.ravel() for each in columns]), axis=1, return_inverse=True)
        return [tuple(each) for each in met.T.tolist()], which.reshape(columns[0].shape)

    def _held(self, candidate: Candidate, *, whole: bool, of: Mapping[tuple[int, ...], int] | None = None) -> Any:
        """Returns the parameters on a device, before fsdp shards them or after; an even share where nobody asked.

        Or the bytes of other state, if `of` is `beside`.
        """
        held_by = self.shards if of is None else of
        sizes, which = self._sizes(candidate)
        held = [(1, *further) if whole else (fsdp, *further) for fsdp, *further in sizes]
        alone = held_by[(1,) * (1 + len(self.axes))]
        return np.array([held_by.get(each, -(-alone // math.prod(each))) for each in held])[which]

    def _seconds(self, kind: str, rows: Any, hardware: Hardware) -> Any:
        peak = 1.0 if self.itemsize == 2 else hardware.chip.f32_flops / hardware.chip.bf16_flops
        own = [each for each in self.trace.matmuls if each.kind == kind]
        return sum((hardware.matmuls(rows * each.flop, each.times) for each in own), 0.0 * rows) / peak

    def _kept(self, candidate: Candidate) -> Any:
        return candidate.microbatch * self._by_remat(candidate, lambda name: self.trace.kept[name])

    def _by_remat(self, candidate: Candidate, value: Callable[[str], Any]) -> Any:
        remat = np.asarray(candidate.remat)
        return np.select([remat == name for name in self.trace.kept], [value(name) for name in self.trace.kept])
