"""Plans a job: builds the planner's question, and turns a layout into overrides. `verify` compiles layouts."""

import dataclasses
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxpar.errors import JaxparError, refuse, suggest
from jaxpar.exchange.base import Exchange
from jaxpar.job.file.dump import dumps, toml_value
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import Job, MeshTable
from jaxpar.job.parts.plan_model import has_formulas, planner_model
from jaxpar.mesh.chips import CHIPS, Chip, find_chip, suggest_chip
from jaxpar.mesh.memory_pool import pool_of_environment
from jaxpar.mesh.target import Target
from jaxpar.models.settings.computing import HOPPER, why_no_part
from jaxpar.parallel.declaration import DECLARED, OPTIONAL
from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.enumeration import check_counts
from jaxpar.plan.machine.hardware import HARDWARE, Hardware, known_machines
from jaxpar.plan.machine.hardware_file import load_hardware
from jaxpar.plan.machine.option_texts import OptionText, flag_text
from jaxpar.plan.machine.software import JAXPAR, JAXPAR_FUSED
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.splits import AXES
from jaxpar.plan.model_protocol import Model, Transformer
from jaxpar.plan.search import Question
from jaxpar.units import parse_bytes, parse_rate, show_bytes

_WORDS = ("true", "false", "inf", "nan")  # words that TOML does not parse as text


def question(
    job: Job,
    *,
    devices: int,
    chip: str,
    per_node: int | None,
    options: Mapping[str, str | None],
    option_text: OptionText = flag_text,
) -> Question:
    """Returns the planner's question for a job.

    Args:
      job: The job; its mesh and layout are ignored.
      devices: Number of devices.
      chip: A key of `jaxpar.plan.machine.hardware.HARDWARE`, or a file as in `jaxpar.plan.machine.hardware_file`.
      per_node: Devices per NVLink domain; None takes that of the chip's usual machine, or of the file.
      options: Options as text; None or a missing key keeps the default. `inside` and `between`: bandwidth per device in
        bytes or bits per second, such as 3GB or 10Gb/s. `memory` of a device, such as 70GiB. `attention`: fused is
        cuDNN's kernel, which a run uses in 16 bits on GPUs (not for gathered keys), unfused is XLA's code; default: as
        in a run. `price` of a GPU-hour, such as 2.5. `schedules`: candidates in place of those of `Choices`, such as
        zb_h1,1f1b_phased or all.
      option_text: Formats options in errors: as flags of `jaxpar plan`, or as arguments of `jp.plan`.

    Raises:
      JaxparError: If the model cannot be planned, the chip's constants are unknown, or a number is out of range.
    """
    if job.sweep.over:
        raise refuse(
            "a job with [sweep]", rule="a plan is for one member, as all are equal", fix="a job without [sweep]"
        )
    request = model_question(
        lambda: planner_model(job, devices), rows=job.train.global_batch, exchange=job.parallel.exchange,
        remat=job.train.remat,
        steps=0 if job.train.grow else job.train.steps,  # the steps of a growing batch differ in length
        devices=devices, chip=chip, per_node=per_node, options=options, option_text=option_text,
    )  # fmt: skip
    if isinstance(request.model, Transformer):
        plain_reason = _why_plain_blocks(job, request.model.shape, request.hardware.chip)
        request = dataclasses.replace(request, model=dataclasses.replace(request.model, no_kernel_reason=plain_reason))
    if job.train.adapters.base == "int8":  # no pipeline supports an int8 base
        return dataclasses.replace(request, choices=dataclasses.replace(request.choices, pipe=1))
    return request


def _why_plain_blocks(job: Job, shape: Shape, chip: Chip) -> str:
    """Explains why ring attention runs in blocks of plain JAX; "" if it runs in cuDNN's kernel.

    Raises:
      JaxparError: If the job requires the kernel and it does not support the chunks.
    """
    kernel, capability = job.parallel.context_kernel, chip.gpu.capability if chip.gpu else None
    if kernel == "plain":
        return "parallel.context_kernel = 'plain'"
    reason = why_no_part(
        dtype="bfloat16", head_dim=shape.head_width, causal=shape.causal, window=None,
        segments=job.data.documents == "apart", ring=1,
        capability=capability[0] + capability[1] / 10 if capability else HOPPER,
    )  # fmt: skip
    if reason and kernel == "cudnn":
        raise refuse(
            f"a plan with parallel.context_kernel = 'cudnn': {reason}",
            rule="with context_kernel = 'cudnn', the kernel must support the job's attention",
            fix="parallel.context_kernel=auto",
        )
    return reason or ""


def model_question(
    model: Callable[[], Model],
    *,
    rows: int,
    exchange: Exchange,
    remat: str,
    steps: int,
    devices: int,
    chip: str,
    per_node: int | None,
    options: Mapping[str, str | None],
    option_text: OptionText = flag_text,
) -> Question:
    """Returns the planner's question for a model.

    Args:
      model: Builds the model; called after the options are validated.
      rows: Examples per step.
      exchange: The exchange between replicas.
      remat: The job's remat; "offload" adds offloading to the choices.
      steps: Steps of the whole run; 0 if unknown.
      devices: As in `question`; so are `chip`, `per_node`, `options` and `option_text`.

    Raises:
      JaxparError: As `question` does.
    """
    check_counts(devices, rows)
    _check_options(per_node, options, option_text)
    price, schedules = _price(options.get("price")), _schedules(options.get("schedules"))
    given = {key: text for key in ("inside", "between", "memory") if (text := options.get(key)) is not None}
    rates = {key: _parse(parse_rate, key, text, option_text) for key, text in given.items() if key != "memory"}
    if slow_links := [key for key, rate in rates.items() if rate < 1]:
        key = slow_links[0]
        got, fix = option_text(key, options[key]), option_text(key, "3GB")
        raise refuse(got, rule="a link moves at least a byte per second", fix=fix)
    memory = int(_parse(parse_bytes, "memory", given["memory"], option_text)) if "memory" in given else None
    if memory is not None and memory < 1:
        raise refuse(
            option_text("memory", given["memory"]),
            rule="the memory that a program may use is at least one byte",
            fix=f"{option_text('memory', '70GiB')}, or without it for what a run gets",
        )
    machine = _hardware(chip, devices, per_node, rates.get("between", 0.0), option_text)
    pool = pool_of_environment(os.environ)
    links = {key: dataclasses.replace(getattr(machine, key), bandwidth=rate) for key, rate in rates.items()}
    unfused = options.get("attention") == "unfused"
    return Question(
        model=model(),
        devices=devices,
        rows=rows,
        hardware=dataclasses.replace(machine, **links),
        choices=_choices(remat, schedules),
        software=dataclasses.replace(JAXPAR if unfused else JAXPAR_FUSED, exchange=exchange),
        memory=pool.program_bytes(machine.chip.visible_memory) if memory is None else memory,
        memory_source=f"of {show_bytes(machine.chip.visible_memory)}: {pool}" if memory is None else "as asked",
        steps=steps,
        price=price,
    )


def _parse(parse: Callable[[str], float], name: str, text: str, option_text: OptionText) -> float:
    """Parses an option; its error names the option."""
    try:
        return parse(text)
    except JaxparError as error:
        raise JaxparError(
            *(
                dataclasses.replace(problem, got=f"{option_text(name, text)}: {problem.got}")
                for problem in error.problems
            )
        ) from error


def _check_options(per_node: object, options: Mapping[str, object], option_text: OptionText) -> None:
    """Raises an error unless the devices of a node are a whole number, and the kernel of attention a known one."""
    if per_node is not None and (type(per_node) is not int or per_node < 1):
        rule = "NVLink joins a whole number of GPUs, at least 1; without it, the chip's usual number"
        raise refuse(option_text("per_node", per_node), rule=rule, fix=option_text("per_node", 8))
    if (attention := options.get("attention")) not in (None, "fused", "unfused"):
        fix = suggest(str(attention), ("fused", "unfused"))
        raise refuse(option_text("attention", attention), rule="attention is fused or unfused", fix=fix)


def _schedules(text: str | None) -> tuple[str, ...]:
    """Parses schedule names separated by commas, or "all"; () without text."""
    names = tuple(LIBRARY) if text == "all" else tuple(name.strip() for name in text.split(",")) if text else ()
    if unknown := [name for name in names if name not in LIBRARY]:
        raise refuse(
            f"--schedules {unknown[0]}",
            rule=f"schedules are {', '.join(LIBRARY)}, with commas, or all",
            fix=suggest(unknown[0], LIBRARY),
        )
    return names


def _price(text: str | None) -> float:
    """Parses the price of a GPU-hour, 0 without text."""
    try:
        price = float(text or 0)
    except ValueError:
        price = -1.0
    if text is not None and not 0 < price < float("inf"):
        raise refuse(f"--price {text}", rule="a GPU-hour costs a number above 0, in whatever money", fix="--price 2.5")
    return price


def _choices(remat: str, schedules: tuple[str, ...]) -> Choices:
    """Returns the planner's choices; includes remat "offload" if the job uses it."""
    choices = Choices(schedules=schedules) if schedules else Choices()
    return dataclasses.replace(choices, remats=(*choices.remats, "offload")) if remat == "offload" else choices


def _hardware(chip: str, devices: int, per_node: int | None, between: float, option_text: OptionText) -> Hardware:
    """Returns the hardware of a known chip or of a chip file."""
    if not isinstance(chip, str):
        raise refuse(option_text("chip", chip), rule="a chip is named by a text", fix=suggest_chip("", HARDWARE))
    if chip in HARDWARE:
        return known_machines(HARDWARE[chip], devices, per_node, between, option_text=option_text)
    if chip.endswith(".toml"):
        machine = load_hardware(chip, devices=devices, per_node=per_node or 0, between=between, option_text=option_text)
        return machine if per_node is None else dataclasses.replace(machine, per_node=per_node)
    if chip in {entry.key for entry in CHIPS}:
        file = f"{chip}.toml"
        raise refuse(
            f"{option_text('chip', chip)}, for which no measured bandwidths and matmul speeds are known",
            rule=f"chips with known constants are {', '.join(sorted(HARDWARE))}; others come with a file of their own",
            fix=f"on one: jaxpar measure gemm --write {file}; jaxpar measure links --write {file}; "
            f"then {option_text('chip', file)}",
        )
    raise refuse(
        option_text("chip", chip),
        rule="a chip whose constants are known, or a .toml file of jaxpar measure links and gemm",
        fix=suggest_chip(chip, HARDWARE),
    )


def command(path: str, file_overrides: Sequence[str], job: Job, planned_job: Job) -> str:
    """Returns the command that trains the planned job from the original job file.

    Args:
      path: The job file.
      file_overrides: Overrides that the file was loaded with.
      job: The loaded job.
      planned_job: The planned job.
    """
    keys_before, keys_after = _flatten(tomllib.loads(dumps(job))), _flatten(tomllib.loads(dumps(planned_job)))
    changed = {key: value for key, value in keys_after.items() if key not in keys_before or keys_before[key] != value}
    retained_words = [word for word in file_overrides if word.partition("=")[0].strip() not in changed]
    words = [f"{key}={value if _is_bare(value) else toml_value(value)}" for key, value in changed.items()]
    return shlex.join(["jaxpar", "train", path, *retained_words, *words])


def _flatten(table: Mapping[str, object], before: str = "") -> dict[str, Any]:
    """Flattens nested tables to dotted keys."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        result |= _flatten(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return result


def _is_bare(value: object) -> bool:
    """Whether a text needs no quotes in an override."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w:./-]*", value) is not None and value not in _WORDS


def overrides(candidate: Candidate, layers: int) -> list[str]:
    """Returns a layout as overrides of a job without any parallel settings."""
    c = candidate
    words = [f"parallel.{axis}={getattr(c, axis)}" for axis in DECLARED]
    further = {axis: size for axis, size in c.axes.items() if size > 1}
    words += [f"parallel.{axis if axis in OPTIONAL else f'axes.{axis}'}={size}" for axis, size in further.items()]
    words += [f"parallel.context_by={c.context_by}"] * (c.context_by != "gather")
    words += [f"parallel.ulysses={c.ulysses}"] * (c.context_by == "ring" and c.ulysses > 1)
    words += ['parallel.zero_over="fsdp x context"'] * bool(c.zero_context)
    words += [f"parallel.zero={c.zero}", f"parallel.sequence={str(bool(c.sequence)).lower()}", f"train.remat={c.remat}"]
    if c.pipe == 1:
        return [*words, f"train.accumulate={c.microbatches}"]
    words += ["train.accumulate=1", f"parallel.pipeline.schedule={c.schedule}"]
    words += [f"parallel.pipeline.microbatches={c.microbatches}", f"parallel.pipeline.chunks={c.chunks}"]
    words.append('parallel.pipeline.keep="residuals"')
    stages = c.pipe * c.chunks
    if layers % stages:
        base, remainder = divmod(layers, c.pipe)
        words.append(f"parallel.pipeline.layers={[base + (stage < remainder) for stage in range(c.pipe)]}")
    return words


def _head(job: Job, candidate: Candidate) -> list[str]:
    """Returns the stages that run the head, if a plan without formulas has decided them."""
    return [f"parallel.pipeline.head={candidate.head}"] * (candidate.pipe > 1 and not has_formulas(job))


def apply_layout(
    job: Job,
    candidate: Candidate,
    layers: int,
    hardware: Hardware | None = None,
    *,
    named: Collection[str] = (),
) -> Job:
    """Returns the job with a planned layout and its number of devices.

    It keeps the exchange, sharding rules, paths and lines, `replicate_above` and `context_kernel`. A model without
    formulas has the specs that the plan found over `context` and `tensor`, `specs = "found"`.

    Args:
      job: The job.
      candidate: The layout.
      layers: Number of layers of the model.
      hardware: The machines; sets `mesh.target` if XLA can compile for their GPUs.
      named: Axes that split dims as the model names them: no specs are found for these.

    Raises:
      JaxparError: If the job does not support the layout.
    """
    base, devices = job.parallel, int(candidate.devices)
    searched = any(candidate.size(axis) > 1 for axis in AXES if axis not in named)
    found = "found" if searched and not has_formulas(job) else ""
    parallel = type(base)(
        exchange=base.exchange, rules=base.rules, paths=base.paths, replicate_above=base.replicate_above,
        activations=base.activations, specs=found,
    )  # fmt: skip
    chip = find_chip(hardware.chip.name) if hardware else None
    target = str(machines(hardware, devices, chip)) if hardware and chip and chip.gpu else ""
    mesh = MeshTable(devices=devices, target=target)
    plain = dataclasses.replace(job, parallel=parallel, mesh=mesh)
    kernel, rotates = base.context_kernel, candidate.context_by != "gather"
    words = [
        *overrides(candidate, layers),
        *_head(job, candidate),
        *[f"parallel.context_kernel={kernel}"] * (rotates and kernel != "auto"),
    ]
    return loads(dumps(plain), words, allow_import=job.allow_import)


def machines(hardware: Hardware, devices: int, chip: Chip) -> Target:
    """Returns the compile target: nodes with the most GPUs that divide `devices` and fit an NVLink domain."""
    gpus = max(n for n in range(1, min(hardware.per_node, devices) + 1) if devices % n == 0)
    return Target(chip, devices // gpus, gpus)


def compiled_chip(hardware: Hardware) -> Chip:
    """Returns the chip to compile for; a chip file is identified by the chip's name inside, not by the file name.

    Raises:
      JaxparError: If XLA can't compile for the chip while it is absent.
    """
    chip = find_chip(hardware.chip.name)
    if chip is None or chip.gpu is None:
        raise refuse(
            f"--verify for {hardware.chip.name}",
            rule=f"chips to compile for are {', '.join(entry.key for entry in CHIPS if entry.gpu)}",
            fix="leave --verify out",
        )
    return chip
