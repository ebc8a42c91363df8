"""Finds specs for a job, and compares their predicted traffic with the program compiled for absent GPUs."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping

from jaxpar.job.check import device_count
from jaxpar.job.file.schema import Job
from jaxpar.job.inspect import observe
from jaxpar.job.parts.batches import abstract_batch
from jaxpar.job.parts.models import batch_errors, frozen_paths, resolve_loss, resolve_model
from jaxpar.mesh.axes import infer_sizes
from jaxpar.parallel.compose import as_blueprint
from jaxpar.specs.find import FoundSpecs, find_specs
from jaxpar.units import show_bytes


def specs_of_job(job: Job, *, chip: str, memory: float | None, examples: bool) -> FoundSpecs:
    """Finds the dims that `tensor` and `context` should split in a job's model; see `jaxpar.specs.find.find_specs`.

    Raises:
      JaxparError: If the job has problems, or no specs can be found.
    """
    loss, batch, parallel = resolve_loss(job), abstract_batch(job), job.effective_parallel
    sized = parallel.with_sizes(infer_sizes(parallel.sizes, device_count(job)))
    plain = dataclasses.replace(job, parallel=dataclasses.replace(sized, specs=""))
    blueprint = as_blueprint(resolve_model(plain, loss))
    with batch_errors(job, blueprint.name, batch):
        return find_specs(
            blueprint, loss, batch, sized, precision=job.train.precision.compute, chip=chip, memory=memory,
            examples=examples, frozen=frozen_paths(job, blueprint),
        )  # fmt: skip


def with_specs(job: Job, found: FoundSpecs) -> Job:
    """Returns the job with the names that were found."""
    return dataclasses.replace(job, parallel=found.parallel)


@dataclasses.dataclass(frozen=True)
class SpecsComparison:
    """Bytes that a device sends over the axes in a step, by kind of collective, and the bytes of memory of a device.

    Attributes:
      axes: The axes.
      predicted: Predicted bytes sent with the specs that were found.
      compiled: Bytes sent by the compiled program with these specs.
      without: Bytes sent by the compiled program without these specs.
      memory: Bytes of a device in the compiled programs with and without these specs.
    """

    axes: tuple[str, ...]
    predicted: Mapping[str, float]
    compiled: Mapping[str, float]
    without: Mapping[str, float]
    memory: tuple[int, int]

    def __str__(self) -> str:
        columns = self.predicted, self.compiled, self.without
        kinds = sorted({kind for given in columns for kind in given})
        title = f"bytes over {' and '.join(self.axes)} per device and step"
        lines = [f"{title:34}{'predicted':>14}{'compiled':>14}{'without specs':>16}"]
        for name, *amounts in (
            *((kind, *(given.get(kind, 0) for given in columns)) for kind in kinds),
            ("all", *(sum(given.values()) for given in columns)),
        ):
            shown = [show_bytes(int(amount)) for amount in amounts]
            lines.append(f"  {name:32}{shown[0]:>14}{shown[1]:>14}{shown[2]:>16}")
        lines.append(f"  {'memory per device':46}{show_bytes(self.memory[0]):>14}{show_bytes(self.memory[1]):>16}")
        return "\n".join(lines)


def compare_specs(job: Job, found: FoundSpecs, target: str) -> SpecsComparison:
    """Compiles a job with and without the specs that were found.

    Raises:
      JaxparError: If it cannot be compiled for the target.
    """
    plain = dataclasses.replace(job, parallel=dataclasses.replace(found.parallel, **_declared_names(job)))
    reports = [observe(each, target) for each in (with_specs(job, found), plain)]
    compiled, without = (bytes_over_axes(report.by_axis, found.axes) for report in reports)
    return SpecsComparison(found.axes, found.solution.traffic, compiled, without, (reports[0].total, reports[1].total))


def bytes_over_axes(by_axis: Mapping[str, Mapping[str, float]], axes: Collection[str]) -> dict[str, float]:
    """Returns the bytes of collectives over some axes of a report and over no other, by kind."""
    totals: Counter[str] = Counter()
    for key, kinds in by_axis.items():
        if {axis.lstrip("~") for axis in key.split(",")} <= {*axes}:
            totals.update({kind: size for kind, size in kinds.items()})
    return dict(totals)


def _declared_names(job: Job) -> dict[str, Mapping]:
    return {name: getattr(job.parallel, name) for name in ("paths", "rules", "activations")}
