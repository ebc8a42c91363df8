"""A job is planned: which layout would be fastest on GPUs that nobody has paid for yet, and what XLA makes of it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import JaxparError, nearest, refuse
from jaxpar.inspector.report import Report
from jaxpar.job.build import resolve_loss, resolve_model
from jaxpar.job.inspect import observe
from jaxpar.job.schema import Job, MeshTable, dumps, loads
from jaxpar.mesh.chips import CHIPS, find_chip
from jaxpar.models.decoder import Decoder
from jaxpar.plan.agreement import rank_correlation
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.hardware import HARDWARE, Hardware
from jaxpar.plan.hardware_file import load_hardware
from jaxpar.plan.practice import JAXPAR, JAXPAR_FUSED
from jaxpar.plan.search import Plan, Question, Ranked, describe
from jaxpar.plan.shape import Shape
from jaxpar.units import parse_bytes, parse_rate, show_bytes, show_seconds


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A prediction beside what XLA made of it.

    Attributes:
      ranked: What was predicted.
      report: What was compiled; None where jaxpar or XLA refuses the layout.
      refusal: Why, in that case.
    """

    ranked: Ranked
    report: Report | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether what was compiled fits."""
        return self.report is not None and bool(self.report.fits)

    @property
    def seconds(self) -> float:
        """Of the compiled program, replayed; 0 where there is none."""
        return self.report.timeline.seconds if self.report is not None and self.report.timeline is not None else 0.0

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted over compiled less 1: of seconds, and of bytes."""
        if self.report is None or not self.seconds:
            return 0.0, 0.0
        return self.ranked.time.total / self.seconds - 1, self.ranked.memory.total / self.report.total - 1

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        found = {"layout": describe(self.ranked.candidate), "refusal": self.refusal}
        if self.report is not None and self.seconds:
            predicted = {"seconds": self.ranked.time.total, "bytes": self.ranked.memory.total}
            replayed = {"seconds": self.seconds, "exposed": self.report.timeline.exposed}  # type: ignore[union-attr]
            causes = {share.cause: share.bytes for share in self.report.memory}
            found |= {"predicted": predicted, "replayed": replayed, "compiled": {"bytes": self.report.total} | causes}
        return found


def shape_of(job: Job) -> Shape:
    """Returns the shape of a job's model.

    Raises:
      JaxparError: If it is no decoder: the formulas of the planner are those of transformers.
    """
    model: Any = resolve_model(job, resolve_loss(job))
    if getattr(model, "func", None) is not Decoder:
        raise refuse(
            f"model.name = {job.model['name']!r}",
            rule="the planner's formulas are those of a decoder",
            fix="jaxpar inspect JOB --target h100:8x8, which compiles any model, one layout at a time",
        )
    return dataclasses.replace(Shape.of(model.args[0]), seq=job.data.seq)


def question(job: Job, *, devices: int, chip: str, per_node: int | None, given: Mapping[str, str | None]) -> Question:
    """Returns what is asked about a job.

    Args:
      job: Its model, sequence and global batch count; its mesh and layout do not.
      devices: How many.
      chip: Which, one of `jaxpar.plan.hardware.HARDWARE`, or a file as in `jaxpar.plan.hardware_file`.
      per_node: How many of them NVLink joins; None is as many as in the chip's usual machine, or as the file says.
      given: Texts that replace the hardware's: `inside` and `between`, bytes or bits per second and device, as 3GB or
        10Gb/s; `memory` of a device, as 70GiB; and `attention`: fused is cuDNN's kernel, unfused what XLA compiles
        where that is not there; None leaves it.

    Raises:
      JaxparError: If the model is no decoder, the chip's constants are not known, or a number is out of its range.
    """
    rates = {key: parse_rate(text) for key in ("inside", "between") if (text := given.get(key))}
    known = _hardware(chip, devices, per_node, rates.get("between", 0.0))
    links = {key: dataclasses.replace(getattr(known, key), bandwidth=rate) for key, rate in rates.items()}
    return Question(
        shape=shape_of(job),
        devices=devices,
        rows=job.train.global_batch,
        hardware=dataclasses.replace(known, **links),
        practice=JAXPAR_FUSED if given.get("attention") == "fused" else JAXPAR,
        memory=parse_bytes(given.get("memory") or 0),
    )


def _hardware(chip: str, devices: int, per_node: int | None, between: float) -> Hardware:
    """Returns the machines of a chip that is known, or of a file."""
    if chip in HARDWARE:
        return HARDWARE[chip] if per_node is None else dataclasses.replace(HARDWARE[chip], per_node=per_node)
    if chip.endswith(".toml"):
        found = load_hardware(chip, devices=devices, per_node=per_node or 0, between=between)
        return found if per_node is None else dataclasses.replace(found, per_node=per_node)
    if chip in {each.key for each in CHIPS}:
        file = f"{chip}.toml"
        raise refuse(
            f"--chip {chip}, whose links and share of the peak nobody measured",
            rule=f"chips with known constants are {', '.join(sorted(HARDWARE))}; others come with a file of their own",
            fix=f"on one: jaxpar bench gemm --write {file}; jaxpar bench links --write {file}; then --chip {file}",
        )
    raise refuse(
        f"--chip {chip}",
        rule="a chip whose constants are known, or a .toml file of jaxpar bench links and gemm",
        fix=nearest(chip, HARDWARE),
    )


def overrides(candidate: Candidate, shape: Shape) -> list[str]:
    """Returns a layout as overrides of a job."""
    c = candidate
    words = [f"parallel.{axis}={getattr(c, axis)}" for axis in ("pipe", "data", "fsdp", "tensor")]
    words += [f"parallel.zero={c.zero}"] * (c.fsdp > 1) + [f"parallel.sequence={str(bool(c.sequence)).lower()}"]
    words.append(f"train.remat={c.remat}")
    if c.pipe == 1:
        return [*words, f"train.accumulate={c.microbatches}"]
    words += ["train.accumulate=1", f"parallel.pipeline.schedule={c.schedule}"]
    words += [f"parallel.pipeline.microbatches={c.microbatches}", f"parallel.pipeline.chunks={c.chunks}"]
    words.append('parallel.pipeline.keep="residuals"')
    parts = c.pipe * c.chunks
    if shape.layers % parts:
        each, more = divmod(shape.layers, c.pipe)
        words.append(f"parallel.pipeline.layers={[each + (stage < more) for stage in range(c.pipe)]}")
    return words


def planned(job: Job, candidate: Candidate, shape: Shape) -> Job:
    """Returns the job with a layout of a plan, for as many devices as that takes.

    Raises:
      JaxparError: If the job does not go with it.
    """
    plain = dataclasses.replace(job, parallel=type(job.parallel)(), mesh=MeshTable(devices=int(candidate.devices)))
    return loads(dumps(plain), overrides(candidate, shape), allow_import=job.allow_import)


def verify(job: Job, plan: Plan, count: int) -> list[Verified]:
    """Compiles the first layouts of a plan for the GPUs it is for.

    Raises:
      JaxparError: If XLA can't compile for them.
    """
    asked = plan.question
    nodes, chip = -(-asked.devices // asked.hardware.per_node), compiled_chip(asked.hardware)
    target = f"{chip}:{nodes}x{min(asked.hardware.per_node, asked.devices)}"
    found = []
    for ranked in plan.best[:count]:
        try:
            report = observe(planned(job, ranked.candidate, asked.shape), target)
        except JaxparError as error:
            found.append(Verified(ranked=ranked, report=None, refusal=str(error.problems[0])))
        else:
            found.append(Verified(ranked=ranked, report=report))
    return found


def compiled_chip(hardware: Hardware) -> str:
    """Returns what a target calls the chip; that of a user's own file goes by its name, not by the file's.

    Raises:
      JaxparError: If XLA can't compile for it where it is not there.
    """
    chip = find_chip(hardware.chip.name)
    if chip is None or chip.gpu is None:
        raise refuse(
            f"--verify for {hardware.chip.name}",
            rule=f"chips to compile for are {', '.join(each.key for each in CHIPS if each.gpu)}",
            fix="leave --verify out",
        )
    return chip.key


def compared(verified: list[Verified]) -> str:
    """Returns predictions beside what was compiled, as lines."""
    lines = ["predicted (modelled) beside compiled (bytes) and replayed (seconds, modelled from the compiled program):"]
    for each in verified:
        name = describe(each.ranked.candidate)
        predicted = f"{show_seconds(each.ranked.time.total)}, {show_bytes(each.ranked.memory.total)}"
        if each.report is None or not each.seconds:
            lines.append(f"  {name}: {predicted}; {each.refusal or 'no time'}")
            continue
        time, memory = each.errors
        lines.append(
            f"  {name}: {predicted}; {show_seconds(each.seconds)} ({time:+.0%}), "
            f"{show_bytes(each.report.total)} ({memory:+.0%})" + ("" if each.fits else ", DOES NOT FIT")
        )
    return "\n".join([*lines, *_agreement(verified)])


def agreement(verified: list[Verified]) -> dict[str, float]:
    """Returns how well predictions agree with what was compiled; nothing of fewer than 3 layouts.

    Both are modelled: the seconds of compiled programs are replayed, not measured.
    """
    both = [each for each in verified if each.seconds]
    if len(both) < 3:
        return {}
    times, bytes_ = ([each.errors[i] for each in both] for i in (0, 1))
    predicted = [each.ranked.time.total for each in both]
    return {
        "layouts": len(both),
        "rank_correlation": rank_correlation(predicted, [each.seconds for each in both]),
        "mean_error_seconds": sum(map(abs, times)) / len(both),
        "mean_error_bytes": sum(map(abs, bytes_)) / len(both),
        "largest_error_bytes": max(map(abs, bytes_)),
    }


def _agreement(verified: list[Verified]) -> list[str]:
    found = agreement(verified)
    if not found:
        return []
    return [
        f"{found['layouts']} layouts: rank correlation of seconds {found['rank_correlation']:.2f} (Spearman), mean "
        f"error {found['mean_error_seconds']:.0%}; of bytes {found['mean_error_bytes']:.0%}, at most "
        f"{found['largest_error_bytes']:.0%}"
    ]
