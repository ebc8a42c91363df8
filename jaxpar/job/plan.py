"""A job is planned: which layout would be fastest on GPUs that nobody has paid for yet. `verify` compiles them."""

import dataclasses
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpar.errors import nearest, refuse
from jaxpar.exchange.base import Exchange
from jaxpar.job.file.dump import dumps, shown
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import Job, MeshTable
from jaxpar.job.parts.plan_model import subject
from jaxpar.mesh.chips import CHIPS, Chip, find_chip
from jaxpar.mesh.memory_pool import taken
from jaxpar.mesh.target import Target
from jaxpar.models.settings.cudnn import HOPPER, why_no_part
from jaxpar.parallel.declare import DECLARED
from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.choices import Choices
from jaxpar.plan.machine.file import load_hardware
from jaxpar.plan.machine.hardware import HARDWARE, Hardware, known_machines
from jaxpar.plan.machine.software import JAXPAR, JAXPAR_FUSED
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.planned import Model, Transformer
from jaxpar.plan.search import Question
from jaxpar.units import parse_bytes, parse_rate, show_bytes

_WORDS = ("true", "false", "inf", "nan")  # what TOML reads as another value than a text


def question(job: Job, *, devices: int, chip: str, per_node: int | None, given: Mapping[str, str | None]) -> Question:
    """Returns what is asked about a job.

    Args:
      job: Its model, sequence and global batch count; its mesh and layout do not.
      devices: How many.
      chip: Which, one of `jaxpar.plan.machine.hardware.HARDWARE`, or a file as in `jaxpar.plan.machine.file`.
      per_node: How many of them NVLink joins; None is as many as in the chip's usual machine, or as the file says.
      given: Texts that replace the hardware's: `inside` and `between`, bytes or bits per second and device, as 3GB or
        10Gb/s; `memory` of a device, as 70GiB; and `attention`: fused is cuDNN's kernel, which a run takes in 16
        bits on GPUs but for gathered keys, unfused what XLA compiles without it; None leaves all as they are,
        and attention as in a run; `price` of a GPU-hour, as 2.5, for what the job costs; and
        `schedules` to weigh, as zb_h1,1f1b_phased or all, in place of those of `Choices`.

    Raises:
      JaxparError: If the model cannot be planned, the chip's constants are not known, or a number is out of its range.
    """
    if job.sweep.over:
        raise refuse(
            "a job with [sweep]", rule="a plan is of one member: all take the same time", fix="a job without [sweep]"
        )
    asked = question_of(
        lambda: subject(job, devices), rows=job.train.global_batch, exchange=job.parallel.exchange,
        remat=job.train.remat,
        steps=0 if job.train.grow else job.train.steps,  # a batch that grows has steps of several lengths
        devices=devices, chip=chip, per_node=per_node, given=given,
    )  # fmt: skip
    if isinstance(asked.model, Transformer):
        why = _in_blocks(job, asked.model.shape, asked.hardware.chip)
        asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, in_blocks=why))
    if job.train.adapters.base == "int8":  # which no pipeline keeps
        return dataclasses.replace(asked, choices=dataclasses.replace(asked.choices, pipe=1))
    return asked


def _in_blocks(job: Job, shape: Shape, chip: Chip) -> str:
    """Returns why blocks of plain JAX run a job's parts of attention where pieces travel; "" where cuDNN's kernel does.

    Raises:
      JaxparError: If the kernel is asked for, and does not run them.
    """
    asked, capability = job.parallel.context_kernel, chip.gpu.capability if chip.gpu else None
    if asked == "plain":
        return "parallel.context_kernel = 'plain'"
    why = why_no_part(
        dtype="bfloat16", head_dim=shape.dim // shape.heads, causal=shape.causal, window=None,
        segments=job.data.documents == "apart", ring=1,
        capability=capability[0] + capability[1] / 10 if capability else HOPPER,
    )  # fmt: skip
    if why and asked == "cudnn":
        raise refuse(
            f"a plan with parallel.context_kernel = 'cudnn': {why}",
            rule="where cuDNN's kernel is asked for, it takes the parts of attention",
            fix="parallel.context_kernel=auto",
        )
    return why or ""


def question_of(
    model: Callable[[], Model],
    *,
    rows: int,
    exchange: Exchange,
    remat: str,
    steps: int,
    devices: int,
    chip: str,
    per_node: int | None,
    given: Mapping[str, str | None],
) -> Question:
    """Returns what is asked about a model.

    Args:
      model: Makes it, once the numbers are known to be good.
      rows: Examples of a step.
      exchange: How replicas agree.
      remat: What is computed again as it is.
      steps: Of the whole run; 0 where that is not told.
      devices: As in `question`; so are `chip`, `per_node` and `given`.

    Raises:
      JaxparError: As `question` does.
    """
    price, schedules = _price(given.get("price")), _schedules(given.get("schedules"))
    rates = {key: parse_rate(text) for key in ("inside", "between") if (text := given.get(key)) is not None}
    if slow := [key for key, rate in rates.items() if rate < 1]:
        key = slow[0]
        raise refuse(f"--{key} {given[key]}", rule="a link moves at least a byte per second", fix=f"--{key} 3GB")
    memory = given.get("memory")
    if memory is not None and parse_bytes(memory) < 1:
        raise refuse(
            f"--memory {memory}",
            rule="the memory that a program may use is at least one byte",
            fix="--memory 70GiB, or without it for what a run gets",
        )
    known = _hardware(chip, devices, per_node, rates.get("between", 0.0))
    pool = taken(os.environ)
    links = {key: dataclasses.replace(getattr(known, key), bandwidth=rate) for key, rate in rates.items()}
    unfused = given.get("attention") == "unfused"
    return Question(
        model=model(),
        devices=devices,
        rows=rows,
        hardware=dataclasses.replace(known, **links),
        choices=_choices(remat, schedules),
        software=dataclasses.replace(JAXPAR if unfused else JAXPAR_FUSED, exchange=exchange),
        memory=pool.room(known.chip.visible) if memory is None else parse_bytes(memory),
        why=f"of {show_bytes(known.chip.visible)}: {pool}" if memory is None else "as asked",
        steps=steps,
        price=price,
    )


def _schedules(text: str | None) -> tuple[str, ...]:
    """Returns the schedules of a text: names with commas, or all; none where there is no text."""
    names = tuple(LIBRARY) if text == "all" else tuple(each.strip() for each in text.split(",")) if text else ()
    if unknown := [each for each in names if each not in LIBRARY]:
        raise refuse(
            f"--schedules {unknown[0]}",
            rule=f"schedules are {', '.join(LIBRARY)}, with commas, or all",
            fix=f"--schedules {nearest(unknown[0], LIBRARY)}",
        )
    return names


def _price(text: str | None) -> float:
    """Returns the price of a GPU-hour, 0 where none is given."""
    try:
        price = float(text or 0)
    except ValueError:
        price = -1.0
    if text is not None and not 0 < price < float("inf"):
        raise refuse(f"--price {text}", rule="a GPU-hour costs a number above 0, in whatever money", fix="--price 2.5")
    return price


def _choices(remat: str, schedules: tuple[str, ...]) -> Choices:
    """Returns what may vary: inputs of layers in host memory too, where they are there already."""
    usual = Choices(schedules=schedules) if schedules else Choices()
    return dataclasses.replace(usual, remats=(*usual.remats, "offload")) if remat == "offload" else usual


def _hardware(chip: str, devices: int, per_node: int | None, between: float) -> Hardware:
    """Returns the machines of a chip that is known, or of a file."""
    if chip in HARDWARE:
        return known_machines(HARDWARE[chip], devices, per_node, between)
    if chip.endswith(".toml"):
        found = load_hardware(chip, devices=devices, per_node=per_node or 0, between=between)
        return found if per_node is None else dataclasses.replace(found, per_node=per_node)
    if chip in {each.key for each in CHIPS}:
        file = f"{chip}.toml"
        raise refuse(
            f"--chip {chip}, whose links and share of the peak nobody measured",
            rule=f"chips with known constants are {', '.join(sorted(HARDWARE))}; others come with a file of their own",
            fix=f"on one: jaxpar measure gemm --write {file}; jaxpar measure links --write {file}; then --chip {file}",
        )
    raise refuse(
        f"--chip {chip}",
        rule="a chip whose constants are known, or a .toml file of jaxpar measure links and gemm",
        fix=nearest(chip, HARDWARE),
    )


def command(path: str, told: Sequence[str], job: Job, made: Job) -> str:
    """Returns the command that trains a planned job from the file of the job that it was planned from.

    Args:
      path: Of that file.
      told: Overrides that it was read with.
      job: As it was read.
      made: As it was planned.
    """
    was, now = _flat(tomllib.loads(dumps(job))), _flat(tomllib.loads(dumps(made)))
    changed = {key: value for key, value in now.items() if key not in was or was[key] != value}
    kept = [word for word in told if word.partition("=")[0].strip() not in changed]
    words = [f"{key}={value if _is_bare(value) else shown(value)}" for key, value in changed.items()]
    return shlex.join(["jaxpar", "train", path, *kept, *words])


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns the keys of a table and of those in it, joined by dots."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def _is_bare(value: Any) -> bool:
    """Returns whether an override may give a text without quotes."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w:./-]*", value) is not None and value not in _WORDS


def overrides(candidate: Candidate, layers: int) -> list[str]:
    """Returns a layout as overrides of a job that says nothing of one."""
    c = candidate
    words = [f"parallel.{axis}={getattr(c, axis)}" for axis in DECLARED]
    words += [f"parallel.axes.{axis}={size}" for axis, size in c.axes.items() if size > 1]
    words += [f"parallel.context_by={c.context_by}"] * (c.context_by != "gather")
    words += [f"parallel.ulysses={c.ulysses}"] * (c.context_by == "ring" and c.ulysses > 1)
    words += ['parallel.zero_over="fsdp x context"'] * bool(c.zero_context)
    words += [f"parallel.zero={c.zero}", f"parallel.sequence={str(bool(c.sequence)).lower()}", f"train.remat={c.remat}"]
    if c.pipe == 1:
        return [*words, f"train.accumulate={c.microbatches}"]
    words += ["train.accumulate=1", f"parallel.pipeline.schedule={c.schedule}"]
    words += [f"parallel.pipeline.microbatches={c.microbatches}", f"parallel.pipeline.chunks={c.chunks}"]
    words.append('parallel.pipeline.keep="residuals"')
    parts = c.pipe * c.chunks
    if layers % parts:
        each, more = divmod(layers, c.pipe)
        words.append(f"parallel.pipeline.layers={[each + (stage < more) for stage in range(c.pipe)]}")
    return words


def planned(job: Job, candidate: Candidate, layers: int, hardware: Hardware | None = None) -> Job:
    """Returns the job with a layout of a plan, for as many devices as that takes.

    Its exchange, its rules and paths of the model's own dims, and what it leaves whole stay.

    Args:
      job: The job.
      candidate: The layout.
      layers: Of the model.
      hardware: Which machines, of which the job then names the target, where XLA compiles for such.

    Raises:
      JaxparError: If the job does not go with it.
    """
    own, devices = job.parallel, int(candidate.devices)
    parallel = type(own)(exchange=own.exchange, rules=own.rules, paths=own.paths, replicate_above=own.replicate_above)
    chip = find_chip(hardware.chip.name) if hardware else None
    target = str(machines(hardware, devices, chip)) if hardware and chip and chip.gpu else ""
    mesh = MeshTable(devices=devices, target=target)
    plain = dataclasses.replace(job, parallel=parallel, mesh=mesh)
    kernel, travels = own.context_kernel, candidate.context_by != "gather"
    words = [*overrides(candidate, layers), *[f"parallel.context_kernel={kernel}"] * (travels and kernel != "auto")]
    return loads(dumps(plain), words, allow_import=job.allow_import)


def machines(hardware: Hardware, devices: int, chip: Chip) -> Target:
    """Returns the machines to compile for: as many GPUs of each as divide all, at most those that NVLink joins."""
    each = max(n for n in range(1, min(hardware.per_node, devices) + 1) if devices % n == 0)
    return Target(chip, devices // each, each)


def compiled_chip(hardware: Hardware) -> Chip:
    """Returns the chip to compile for; that of a user's own file goes by its name, not by the file's.

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
    return chip
