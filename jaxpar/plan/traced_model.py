"""The plan of any model: traced once on shapes, planned over data, fsdp and expert, and axes of added techniques.

    matmuls       2 FLOP per multiplication of every matmul and convolution in the forward pass; twice that backward
    elementwise   5 times the bytes of the residuals: written and read in the forward pass; read in the backward pass,
                  with their gradient written and read; written and read once more if they are recomputed
    activations   residuals of `jax.vjp` that grow with the batch, under the remat policy
    working       residuals that one block recomputes; with ZeRO-3, twice the largest array that is gathered at once, or
                  without recomputation all gathered parameters, which are kept for the backward pass

XLA's fusions and extra copies are not modelled: `--verify` compiles.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import all_layouts, select
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory, bytes_by_zero_stage
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.model.tracing import Kind, ModelTrace
from jaxpar.plan.techniques.base import Work, divisors
from jaxpar.plan.techniques.span import gathers_once, gradient_bytes
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.plan.techniques.totals import added_bytes, collectives, overlapped_seconds, step_seconds, unused_axes
from jaxpar.plan.time import StepTime, optimizer

FORWARD, BACKWARD = 2, 3  # reads and writes per residual: in the forward pass; in the backward pass, with its gradient
AGAIN: Mapping[str, tuple[Kind, ...]] = {
    # kinds of matmuls that each remat policy recomputes: jax.checkpoint_policies save no convolutions
    "none": (),
    "all_dots": ("convolution",),
    "dots": ("convolution", "batched"),
    "full": ("convolution", "batched", "weights"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A model that is planned only from its trace.

    Attributes:
      name: The user's name of the model.
      shards: Sizes of `fsdp` and of further axes to the parameters on a device; sizes of 1 map to all parameters.
      other_state: The same sizes to the bytes on a device of state that is not a parameter.
      unsupported: Sizes that the model does not support, to the reason.
      largest_array: Parameters of the largest array that is gathered at once: a parameter, or a layer of a stack.
      recipe: Bytes per parameter of the training state.
      trace: Matmuls and residuals.
      itemsize: Bytes of the matmuls' dtype: 2 or 4.
      sum_loss: Whether the loss is a (sum, count), which microbatches need.
      axes: Further axes, of added techniques that can split this model.
      dims: Names of parameter dims to a number that divides all dims of that name.
      parameters_by_dim: Names of dims to the parameters in all arrays that have such a dim.
    """

    name: str
    shards: Mapping[tuple[int, ...], int]
    other_state: Mapping[tuple[int, ...], int]
    unsupported: Mapping[tuple[int, ...], str]
    largest_array: int
    recipe: Recipe
    trace: ModelTrace
    itemsize: int
    sum_loss: bool
    axes: tuple[str, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    parameters_by_dim: Mapping[str, int] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
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
    def has_published_runs(self) -> bool:
        """False: all published runs are of decoders."""
        return False

    def step_flop(self, rows: int) -> float:
        """Returns 3 times the FLOP of the forward pass's matmuls and convolutions: backward is twice forward."""
        return 3.0 * rows * sum(matmul.flop * matmul.times for matmul in self.trace.matmuls)

    def masked_flop(self, rows: int) -> float:
        """Returns 0: the trace does not show masks."""
        return 0.0

    def attention(self, software: SoftwareModel) -> str:
        """Returns a note that attention is priced by its traced matmuls; "" if there are no batched matmuls."""
        return "as traced, without a GPU's fused kernel" if any(p.kind == "batched" for p in self.trace.matmuls) else ""

    def exclusions(self, choices: Choices) -> tuple[str, ...]:
        """Returns the axes, remat policies and sizes that the model does not support, with reasons."""
        remats = [policy for policy in AGAIN if policy not in self.trace.residual_bytes]
        return (
            *unused_axes(self),
            *["microbatches: the loss is a mean; return (sum, count) to accumulate over them"] * (not self.sum_loss),
            *[f"remat {', '.join(remats)}: {self.name} marks no blocks for it"] * bool(remats),
            *self.unsupported.values(),
        )

    def storable(self, candidate: Candidate) -> Any:
        """Whether a layout has no pipeline: a traced model has no stages."""
        return np.equal(candidate.pipe, 1)

    def legal(self, *, devices: int, rows: int, choices: Choices) -> Candidate:
        """Returns all layouts of data, fsdp and further axes, with the model's remat policies.

        Raises:
          JaxparError: If the devices do not divide the examples.
        """
        remats = tuple(name for name in choices.remats if name in self.trace.residual_bytes)
        layouts = all_layouts(self, devices=devices, rows=rows, choices=replace(choices, remats=remats))
        if layouts is None:
            replicas = " x ".join(axis for axis in batch_axes() if axis in TECHNIQUES)
            raise refuse(
                f"{devices:,} devices for {rows} examples",
                rule=f"{replicas}, the devices, divides the examples of the global batch",
                fix=f"--devices {max(n for n in divisors(rows) if n <= devices)}, or train.global_batch = "
                f"{-(-rows // devices) * devices}",
            )
        sizes, indices = self._sizes(layouts)
        supported = np.array([size in self.shards for size in sizes])[indices]
        return select(layouts, supported & (self.sum_loss | (layouts.microbatches == 1)))

    def memory(self, candidate: Candidate, software: SoftwareModel) -> Memory:
        """Returns the bytes of a device, by cause."""
        model_software, unsharded_parameters = self._software(software), self._stored(candidate, whole=True)
        shard = self._stored(candidate, whole=False)
        state = [
            self._stored(candidate, whole=unsharded, amounts_by_size=self.other_state) for unsharded in (True, False)
        ]
        extra_state = {"state": np.where(np.equal(candidate.zero, 0), *state)} if any(self.other_state.values()) else {}
        parameters, gradients, moments = bytes_by_zero_stage(unsharded_parameters, shard, candidate, self.recipe)
        residuals, all_residuals = (
            self._residual_bytes(candidate),
            candidate.microbatch * self.trace.residual_bytes["none"],
        )
        piece = 2.0 * np.equal(candidate.zero, 3) * self.largest_array
        whole_gathered = gathers_once(candidate, self.recipe) | model_software.keeps_gathered(candidate)
        gathered = self.itemsize * np.where(whole_gathered, unsharded_parameters, piece)
        return (
            Memory(
                parameters=parameters,
                gradients=gradient_bytes(gradients, candidate, model_software, self.recipe),
                optimizer=moments,
                activations=residuals,
                logits=0.0 * residuals,
                working=(all_residuals - residuals) / max(self.trace.blocks, 1) + gathered,
            )
            .plus(extra_state)
            .plus(added_bytes(self, candidate, model_software, self.recipe))
        )

    def time(self, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
        """Returns the seconds of a step, by cause."""
        software, rows, count = self._software(software), candidate.microbatch, candidate.microbatches
        forward = {kind: self._seconds(kind, rows, hardware) for kind in AGAIN["full"]}
        forward_seconds, residuals = sum(forward.values()), rows * self.trace.residual_bytes["none"]
        extra_matmuls = self._by_remat(candidate, lambda name: sum(forward[kind] for kind in AGAIN[name]))
        extra_traffic = hardware.stream(FORWARD * (residuals - self._residual_bytes(candidate)))
        elementwise = hardware.stream((FORWARD + BACKWARD) * residuals)
        parameters = self._stored(candidate, whole=True)
        accumulation = np.where(np.greater(count, 1), hardware.stream(software.accumulate * parameters), 0.0)
        compute = count * (3 * forward_seconds + extra_matmuls + extra_traffic + elementwise + accumulation)
        zeros = 0.0 * compute
        work = Work(parameters=parameters, layers=self.trace.blocks, compute=compute)
        return StepTime(
            matmuls=3 * count * forward_seconds,
            attention=zeros,
            elementwise=count * (elementwise + accumulation),
            recompute=count * (extra_matmuls + extra_traffic),
            **{cause: zeros + exposed for cause, exposed in step_seconds(self, candidate, hardware, software).items()},
            **overlapped_seconds(work, candidate, hardware, software),
            bubble=zeros,
            send=zeros,
            stragglers=compute * hardware.straggler_share(candidate.devices),
            optimizer=optimizer(parameters, candidate, hardware, software),
        ).times(hardware.calibration)

    def collectives(self, candidate: Candidate, software: SoftwareModel) -> list[Collective]:
        """Returns the collectives of one step of one layout; see `jaxpar.plan.techniques.totals`."""
        return collectives(self, candidate, self._software(software))

    def host_bytes(self, candidate: Candidate) -> float:
        """Returns 0.0: a traced model offloads nothing."""
        return 0.0

    def largest_layer(self, software: SoftwareModel) -> float:
        """Returns the bytes of the largest array's training state, and of the residuals of one block and one row."""
        return self.recipe.total * self.largest_array + self.trace.residual_bytes["none"] / max(self.trace.blocks, 1)

    def _software(self, software: SoftwareModel) -> SoftwareModel:
        """Returns the software model with collectives in the dtype of the matmuls."""
        return replace(software, wire=(float(self.itemsize),) * 2)

    def _sizes(self, candidate: Candidate) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """Returns the distinct sizes of fsdp and of further axes, and the index of each candidate's sizes."""
        columns = np.broadcast_arrays(*(candidate.size(axis) for axis in ("fsdp", *self.axes)))
        distinct, indices = np.unique(np.stack([column.ravel() for column in columns]), axis=1, return_inverse=True)
        return [tuple(column) for column in distinct.T.tolist()], indices.reshape(columns[0].shape)

    def _stored(
        self, candidate: Candidate, *, whole: bool, amounts_by_size: Mapping[tuple[int, ...], int] | None = None
    ) -> Any:
        """Returns the parameters on a device, or the bytes of other state, by the sizes in `amounts_by_size`.

        `whole`: before fsdp shards them. Sizes that are not in the table get an even share.
        """
        amounts = self.shards if amounts_by_size is None else amounts_by_size
        sizes, indices = self._sizes(candidate)
        keys = [(1, *further_sizes) if whole else (fsdp, *further_sizes) for fsdp, *further_sizes in sizes]
        total = amounts[(1,) * (1 + len(self.axes))]
        return np.array([amounts.get(key, -(-total // math.prod(key))) for key in keys])[indices]

    def _seconds(self, kind: str, rows: np.ndarray | float, hardware: Hardware) -> Any:
        peak = 1.0 if self.itemsize == 2 else hardware.chip.f32_flops / hardware.chip.bf16_flops
        matmuls = [matmul for matmul in self.trace.matmuls if matmul.kind == kind]
        return sum((hardware.matmuls(rows * matmul.flop, matmul.times) for matmul in matmuls), 0.0 * rows) / peak

    def _residual_bytes(self, candidate: Candidate) -> Any:
        return candidate.microbatch * self._by_remat(candidate, lambda name: self.trace.residual_bytes[name])

    def _by_remat(self, candidate: Candidate, value: Callable[[str], Any]) -> Any:
        remat = np.asarray(candidate.remat)
        return np.select(
            [remat == name for name in self.trace.residual_bytes], [value(name) for name in self.trace.residual_bytes]
        )
