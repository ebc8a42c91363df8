"""The plan of any model: traced once on shapes, planned over data, fsdp, context, tensor, expert and pipe, and added
techniques.

    matmuls       2 FLOP per multiplication of every matmul and convolution of the loss and its gradients; parameters
                  that are not trained have no gradient
    elementwise   bytes that the other kernels read and write, `model/fusion.py`; each array's sum over microbatches,
                  and copies around its collectives over fsdp
    recompute     the kernels of the program under the remat policy beyond those without it
    activations   live bytes at the fullest moment of the program, `model/liveness.py`; with microbatches, the batch of
                  all of them twice: as it is given, and in their order
    gradients     those that exist at that moment; with microbatches, also their sum
    working       copies of parameters in 16 bits at that moment; with ZeRO-3, twice the largest array that is gathered
                  at once, or without recomputation all gathered parameters, which are kept for the backward pass
    optimizer     its state, parameters and gradients read and written, and the kernels of each array

The program is traced once per remat policy, split by the dims that were found for sizes of `context` and `tensor`, and
estimated as XLA compiles it; `--verify` compiles it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import batch_axes
from jaxpar.mesh.collective import Collective
from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import all_layouts, select
from jaxpar.plan.machine.hardware import SMALLEST_KERNEL, Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory, bytes_by_zero_stage
from jaxpar.plan.model.liveness import REDUCED, SCATTERED, Estimate
from jaxpar.plan.model.splits import ModelSplit, Sizes
from jaxpar.plan.model.stages import StageTrace
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.model.tracing import ModelTrace
from jaxpar.plan.techniques.base import Work, divisors
from jaxpar.plan.techniques.span import gathers_once, gradient_bytes
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.plan.techniques.totals import added_bytes, collectives, overlapped_seconds, step_seconds, unused_axes
from jaxpar.plan.time import StepTime, optimizer
from jaxpar.plan.traced_stages import by_kind, stages_memory, stages_time, supports, value_of

COPIES = 2  # kernels for each array around its gather and its scatter, as XLA 0.12 compiles them for H100s
REMATS = "all_dots", "dots", "full"  # policies of models that mark blocks, from the least recomputation on


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A model that is planned only from its trace.

    Attributes:
      name: The user's name of the model.
      shards: Maps sizes of `fsdp` and of further axes to the parameters on a device; sizes of 1 map to all parameters.
      other_state: Maps the same sizes to a device's bytes of state that is not a parameter.
      unsupported: Sizes that the model does not support, each with the reason.
      largest_array: Parameters of the largest array that is gathered at once: a parameter, or a layer of a stack.
      recipe: Bytes per parameter of the training state.
      trace: Matmuls, and estimates of the compiled program.
      itemsize: Bytes of the matmuls' dtype: 2 or 4.
      sum_loss: Whether the loss is a (sum, count), which microbatches need.
      axes: Further axes, of added techniques that can split this model.
      dims: Maps the name of parameter dims to a number that divides the size of all dims of that name.
      stacked: Share of the parameters that are stacks of layers, whose gradients a scan returns all at once.
      splits: Maps sizes of (context, tensor) to the split of the model; `axes` then contains these axes.
      no_splits: Sizes of these axes that are left out, each with the reason.
      named_axes: Those of these axes that split dims as the model names them: no specs are found for them, and they
        sum gradients together with `data`.
      parameters_by_dim: Maps a dim name to the number of parameters in arrays that have such a dim.
      arrays: (number of layers, elements per layer) of each trained array; 1 layer if it is not a stack.
      stages: The parts of the model in a pipeline; None if it cannot be pipelined.
      no_pipeline: The reason why it cannot; "" if it can.
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
    stacked: float = 0.0
    splits: Mapping[Sizes, ModelSplit] = field(default_factory=dict)
    no_splits: tuple[str, ...] = ()
    named_axes: tuple[str, ...] = ()
    arrays: tuple[tuple[int, int], ...] = ()
    stages: StageTrace | None = None
    no_pipeline: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.shards[(1,) * (1 + len(self.axes))]

    @property
    def layers(self) -> int:
        """Number of equal layers that a pipeline can cut; 1 if there are none."""
        return self.stages.layers if self.stages else 1

    @property
    def pipe_sizes(self) -> tuple[int, ...]:
        """Numbers of stages that divide the layers, 1 included."""
        return (1, *self.stages.pipe_sizes) if self.stages else (1,)

    @property
    def _stages(self) -> StageTrace:
        if self.stages is None:
            raise refuse(
                f"a pipeline of {self.name}",
                rule=f"no pipeline cuts it: {self.no_pipeline}",
                fix="a layout with pipe 1",
            )
        return self.stages

    def message_bytes(self, candidate: Candidate) -> Any:
        """Returns the bytes that pass from a stage to the next one for a microbatch."""
        return value_of(self._stages.message, candidate)

    @property
    def unit(self) -> tuple[str, int]:
        """Examples."""
        return "examples", 1

    @property
    def has_published_runs(self) -> bool:
        """False: all published runs are of decoders."""
        return False

    def step_flop(self, rows: int) -> float:
        """Returns the FLOP of the matmuls and convolutions of the loss and its gradients, without recomputation."""
        matmuls = (*self.trace.matmuls, *self.trace.backward)
        return float(rows) * sum(matmul.flop * matmul.times for matmul in matmuls)

    def masked_flop(self, rows: int) -> float:
        """Returns 0: the trace does not show masks."""
        return 0.0

    def attention(self, software: SoftwareModel) -> str:
        """Returns a note that attention is priced by its traced matmuls; "" if there are no batched matmuls."""
        return "as traced, without a GPU's fused kernel" if any(p.kind == "batched" for p in self.trace.matmuls) else ""

    def exclusions(self, choices: Choices) -> tuple[str, ...]:
        """Returns the axes, remat policies and sizes that the model does not support, with reasons."""
        remats = [policy for policy in REMATS if policy not in self.trace.programs]
        return (
            *unused_axes(self),
            *["microbatches: the loss is a mean; return (sum, count) to accumulate over them"] * (not self.sum_loss),
            *[f"remat {', '.join(remats)}: {self.name} marks no blocks for it"] * bool(remats),
            *self.no_splits,
            *self._pipelines_left_out(choices),
            *dict.fromkeys(self.unsupported.values()),
        )

    def _pipelines_left_out(self, choices: Choices) -> Iterator[str]:
        if self.stages is None:
            return
        if self.axes:
            yield f"pipe with {' or '.join(self.axes)}: stages are priced with layers that pipe alone cuts"
        names = [name for name in LIBRARY if name not in choices.schedules or Candidate(schedule=name).split]
        whole = [name for name in names if not Candidate(schedule=name).split]
        if whole:
            yield f"schedules {', '.join(whole)}: --schedules all weighs them too"
        if split := [name for name in names if name not in whole]:
            yield f"schedules {', '.join(split)}: they split backwards, which is priced for decoders"

    def storable(self, candidate: Candidate) -> Any:
        """Whether jaxpar's program can store the parameters in equal shards; `legal` has left the others out."""
        return np.full(np.shape(candidate.pipe), True)

    def legal(self, *, devices: int, rows: int, choices: Choices) -> Candidate:
        """Returns all layouts of data, fsdp and further axes, with the model's remat policies.

        Raises:
          JaxparError: If the devices do not divide the examples.
        """
        remats = tuple(name for name in choices.remats if name in self.trace.programs)
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
        if self.stages:
            supported = np.where(layouts.pipe > 1, supports(self.stages, layouts), supported)
        return select(layouts, supported & (self.sum_loss | (layouts.microbatches == 1)))

    def memory(self, candidate: Candidate, software: SoftwareModel) -> Memory:
        """Returns the bytes of a device, by cause."""
        return by_kind(
            candidate,
            lambda unpipelined: self._memory(unpipelined, software),
            lambda staged: stages_memory(self._stages, staged, self._software(software), self.recipe),
        )

    def _memory(self, candidate: Candidate, software: SoftwareModel) -> Memory:
        model_software, unsharded_parameters = self._software(software), self._stored(candidate, whole=True)
        shard = self._stored(candidate, whole=False)
        state = [
            self._stored(candidate, whole=unsharded, amounts_by_size=self.other_state) for unsharded in (True, False)
        ]
        extra_state = {"state": np.where(np.equal(candidate.zero, 0), *state)} if any(self.other_state.values()) else {}
        parameters, gradients, moments = bytes_by_zero_stage(unsharded_parameters, shard, candidate, self.recipe)
        zero3, accumulates = np.equal(candidate.zero, 3), np.greater(candidate.microbatches, 1)
        whole_gathered = gathers_once(candidate, self.recipe) | model_software.keeps_gathered(candidate)
        piece = 2.0 * zero3 * self.largest_array * unsharded_parameters / self.parameters
        # shards are cast once, before the loop over microbatches
        cast = np.where(zero3 & accumulates, shard, 0.0)
        gathered = self.itemsize * (np.where(whole_gathered, unsharded_parameters, piece) + cast)
        summed = gradient_bytes(gradients, candidate, model_software, self.recipe, stacked=self.stacked)
        # one collective reduces a microbatch's gradients of all arrays that are no stacks
        several = np.greater(candidate.replicas, 1)
        unreduced = several * (1 - self.stacked) * model_software.wire[1] * unsharded_parameters
        peak = self._peak(candidate, copies=np.equal(gathered, 0), gradients=np.where(accumulates, unreduced, summed))
        return (
            Memory(
                parameters=parameters,
                gradients=peak["gradients"] + np.where(accumulates, summed, 0.0),
                optimizer=moments,
                activations=peak["activations"] + np.where(accumulates, self._split_batch(candidate), 0.0),
                logits=0.0 * peak["activations"],
                working=peak["weights"] + gathered,
            )
            .plus(extra_state)
            .plus(added_bytes(self, candidate, model_software, self.recipe))
        )

    def _split_batch(self, candidate: Candidate) -> Any:
        """Returns the bytes of a device's batch of all microbatches, and of a copy that is reordered by microbatch."""
        batch = self.trace.programs["none"].batch
        rows = np.multiply(candidate.microbatch, candidate.microbatches)
        return 2 * sum(amount * np.power(np.asarray(rows, float), power) for power, amount in enumerate(batch))

    def _peak(self, candidate: Candidate, *, copies: Any, gradients: Any) -> dict[str, Any]:
        """Returns the live bytes at the fullest moment of the loss and its gradients, by class.

        Args:
          candidate: The layout.
          copies: Whether the program itself copies parameters (e.g. by a cast), rather than gathering them.
          gradients: Bytes of all gradients of a device.
        """
        # gradients of replicas are scattered over fsdp, or all-reduced
        combined = np.where(np.greater(candidate.fsdp, 1), SCATTERED, np.where(candidate.replicas > 1, REDUCED, 0))
        columns = np.broadcast_arrays(
            candidate.microbatch, candidate.remat, candidate.context, candidate.tensor, copies, gradients, combined
        )
        results: dict[tuple, dict[str, float]] = {}
        for row in zip(*(column.ravel().tolist() for column in columns), strict=True):
            if row not in results:
                microbatch, remat, context, tensor, own, size, bytes_combined = row
                program = self._program(remat, context, tensor)
                results[row] = program.peak(
                    microbatch, weights=float(own), gradients=size / max(program.gradient_bytes, 1.0),
                    combined=bytes_combined,
                )  # fmt: skip
        rows = [results[row] for row in zip(*(column.ravel().tolist() for column in columns), strict=True)]
        return {name: np.array([row[name] for row in rows]).reshape(columns[0].shape) for name in rows[0]}

    def time(self, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
        """Returns the seconds of a step, by cause."""
        return by_kind(
            candidate,
            lambda unpipelined: self._time(unpipelined, hardware, software),
            lambda staged: stages_time(
                self._stages, staged, hardware, self._software(software), update=self._update_bytes()
            ),
        )

    def _time(self, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
        software, count = self._software(software), candidate.microbatches
        plain = self._kernels(candidate, hardware, remat="none")
        kernels = self._kernels(candidate, hardware)
        recompute = np.maximum(sum(kernels.values()) - sum(plain.values()), 0.0)
        # remat may even save time: writing stacked residuals can cost more than recomputing them
        plain["elementwise"] = plain["elementwise"] + np.minimum(sum(kernels.values()) - sum(plain.values()), 0.0)
        parameters = self._stored(candidate, whole=True)
        accumulation = np.where(
            np.greater(count, 1),
            self._array_seconds(software.accumulate, candidate, hardware, layers=False),
            0.0,
        )
        copies = np.where(
            np.greater(candidate.fsdp, 1),
            COPIES * self._array_seconds(2 * self.itemsize, candidate, hardware, layers=True),
            0.0,
        )
        compute = count * (sum(plain.values()) + recompute + accumulation) + copies
        zeros = 0.0 * compute
        work = Work(parameters=parameters, layers=self.trace.blocks, compute=compute)
        return StepTime(
            matmuls=count * plain["matmuls"],
            attention=zeros,
            elementwise=count * (plain["elementwise"] + accumulation) + copies,
            recompute=count * recompute,
            **{cause: zeros + exposed for cause, exposed in step_seconds(self, candidate, hardware, software).items()},
            **overlapped_seconds(work, self._summing(candidate), hardware, software),
            bubble=zeros,
            send=zeros,
            stragglers=compute * hardware.straggler_share(candidate.devices),
            optimizer=optimizer(parameters, candidate, hardware, replace(software, update=self._update_bytes()))
            + SMALLEST_KERNEL * self.trace.programs["none"].update_kernels,
        ).times(hardware.calibration)

    def _summing(self, candidate: Candidate) -> Candidate:
        """Returns the layout with the devices of a found `context` counted to `tensor`: its traffic has its own sums of
        gradients, and the strides stay.
        """
        if "context" in self.named_axes:
            return candidate
        return replace(candidate, context=1, tensor=np.multiply(candidate.context, candidate.tensor))

    def _program(self, remat: str, context: int, tensor: int) -> Estimate:
        """Returns the estimate of a device's program under a remat policy; a model without blocks has one for all."""
        programs = self.trace.split_programs.get((context, tensor), self.trace.programs)
        return programs.get(remat, programs["none"])

    def _kernels(self, candidate: Candidate, hardware: Hardware, *, remat: str | None = None) -> dict[str, Any]:
        """Returns the seconds of a microbatch's matmuls and other kernels, under a remat policy or the candidate's."""
        policies = candidate.remat if remat is None else remat
        # with shards or several microbatches, a step casts its shards once
        casts = np.equal(candidate.fsdp, 1) & np.equal(candidate.microbatches, 1)
        columns = np.broadcast_arrays(candidate.microbatch, casts, policies, candidate.context, candidate.tensor)
        keys = [*zip(*(column.ravel().tolist() for column in columns), strict=True)]
        results = {
            (rows, casts, *names): self._program(*names).seconds(rows, hardware, casts=casts)
            for rows, casts, *names in {*keys}
        }
        return {
            cause: np.array([results[key][cause] for key in keys]).reshape(columns[0].shape)
            for cause in ("matmuls", "elementwise")
        }

    def _array_seconds(self, width: float, candidate: Candidate, hardware: Hardware, *, layers: bool) -> Any:
        """Returns the seconds of a kernel of `width` bytes per entry for each array, or for each layer of a stack."""
        share = self._stored(candidate, whole=True) / self.parameters
        return sum(
            (count if layers else 1)
            * np.maximum(SMALLEST_KERNEL, hardware.stream(width * share * (size if layers else count * size)))
            for count, size in self.arrays
        )

    def _update_bytes(self) -> float:
        """Returns the bytes per parameter of the update: state read and written, gradients read by norm and update."""
        written = self.trace.programs["none"].gradient_bytes / self.parameters
        trained = self.recipe.gradients / self.recipe.parameters
        return 2 * (trained * self.recipe.parameters + self.recipe.optimizer + written)

    def collectives(self, candidate: Candidate, software: SoftwareModel) -> list[Collective]:
        """Returns the collectives of one step of one layout; see `jaxpar.plan.techniques.totals`."""
        return collectives(self, candidate, self._software(software))

    def host_bytes(self, candidate: Candidate) -> float:
        """Returns 0.0: a traced model offloads nothing."""
        return 0.0

    def largest_layer(self, software: SoftwareModel) -> float:
        """Returns the bytes of the largest array's training state, and of the activations of one block and one row."""
        activations = self.trace.programs["none"].peak(1, weights=0.0, gradients=0.0)["activations"]
        return self.recipe.total * self.largest_array + activations / max(self.trace.blocks, 1)

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

        With `whole`, the parameters before fsdp shards them. Sizes that are not in the table get an even share.
        """
        amounts = self.shards if amounts_by_size is None else amounts_by_size
        sizes, indices = self._sizes(candidate)
        keys = [(1, *further_sizes) if whole else (fsdp, *further_sizes) for fsdp, *further_sizes in sizes]
        total = amounts[(1,) * (1 + len(self.axes))]
        return np.array([amounts.get(key, -(-total // math.prod(key))) for key in keys])[indices]
