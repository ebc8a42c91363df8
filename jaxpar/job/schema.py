"""The text of a job becomes a `Job`, or every problem at once.

Each table of the file is a dataclass of the room it belongs to; what its keys mean is
read off that dataclass's docstring, so it is written once.
"""

import dataclasses
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pydantic

from jaxpar.errors import JaxparError, Problem, nearest, refuse
from jaxpar.optim.chain import Optimizer
from jaxpar.parallel.declare import Parallel
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.data.sources import Data
from jaxpar.train.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """Where a run lives.

    Attributes:
      dir: The run folder; "" means runs/ and the name of the job file.
      resume: auto goes on from the latest checkpoint if there is one; never starts anew and
        refuses a folder that has checkpoints; must refuses a folder that has none.
    """

    dir: str = ""
    resume: Literal["auto", "never", "must"] = "auto"


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """Which devices a job uses.

    Attributes:
      simulate: So many simulated devices on the processor; 0 means the real ones.
      devices: So many real devices, the first ones; 0 means all. `jaxpar check` believes it
        on a machine that has fewer.
    """

    simulate: int = 0
    devices: int = 0

    def __post_init__(self):
        for key in ("simulate", "devices"):
            if getattr(self, key) < 0:
                raise refuse(
                    f"mesh.{key} = {getattr(self, key)}", rule="a number of devices is not negative", fix=f"{key} = 8"
                )
        if self.simulate and self.devices:
            raise refuse(
                f"mesh.simulate = {self.simulate} and mesh.devices = {self.devices}",
                rule="devices are simulated or real",
                fix="leave one out",
            )


@dataclass(frozen=True, kw_only=True)
class TrainTable:
    """How long, on how much at once, and in which numbers.

    Attributes:
      steps: Updates of the whole run.
      global_batch: Examples per step, over all devices and microbatches.
      accumulate: Microbatches per step.
      seed: Of the parameters, of dropout and of the order of examples.
      loss: next_token, classify, or "package.module:function" of (model, batch).
      precision: fp32, or bf16: products in bfloat16, parameters and optimizer in float32.
      remat: What the backward pass keeps: none (all), dots, all_dots or full (least).
      offload: Keep the optimizer state in host memory between steps.
      eval_every: Steps between evaluations on the held-out examples; 0 evaluates at the end only.
      eval_batches: Most batches per evaluation; 0 takes all that are held out.
    """

    steps: int = 100
    global_batch: int = 32
    accumulate: int = 1
    seed: int = 0
    loss: str = "next_token"
    precision: Literal["fp32", "bf16"] = "fp32"
    remat: Literal["none", "dots", "all_dots", "full"] = "none"
    offload: bool = False
    eval_every: int = 0
    eval_batches: int = 0

    def __post_init__(self):
        for key, low in (
            ("steps", 1),
            ("global_batch", 1),
            ("accumulate", 1),
            ("seed", 0),
            ("eval_every", 0),
            ("eval_batches", 0),
        ):
            if getattr(self, key) < low:
                raise refuse(
                    f"train.{key} = {getattr(self, key)}", rule=f"{key} is at least {low}", fix=f"{key} = {low}"
                )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, as its file declares it.

    Attributes:
      run: Where it lives.
      mesh: Which devices.
      parallel: How they are used.
      model: `name` (decoder, vit, resnet, mlp or "package.module:Object") and its settings.
      data: What to train on.
      optimizer: How gradients become updates.
      train: How long, on how much at once.
      checkpoint: When the state is saved.
      metrics: What is written down.
    """

    run: RunTable = field(default_factory=RunTable)
    mesh: MeshTable = field(default_factory=MeshTable)
    parallel: Parallel = field(default_factory=Parallel)
    model: dict[str, Any] = field(default_factory=lambda: {"name": "decoder"})
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: TrainTable = field(default_factory=TrainTable)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    metrics: Metrics = field(default_factory=Metrics)


TABLES: dict[str, type] = {
    f.name: hint for f in dataclasses.fields(Job) if dataclasses.is_dataclass(hint := get_type_hints(Job)[f.name])
}  # pyright: ignore[reportAssignmentType]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job of a TOML file, with `section.key=value` overrides.

    Raises:
      JaxparError: With every unknown key, wrong type and value out of range at once.
    """
    job, problems = read(path, overrides)
    if problems:
        raise JaxparError(*problems)
    return job


def loads(text: str, overrides: Sequence[str] = ()) -> Job:
    """Returns the job of a TOML text; see `load`."""
    job, problems = _read(text, overrides, "job")
    if problems:
        raise JaxparError(*problems)
    return job


def read(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Job, list[Problem]]:
    """Returns the job of a file and what is wrong with it; what is wrong has its default in the job.

    Raises:
      JaxparError: If the file cannot be read, or is no TOML.
    """
    path, way_out = Path(path), "jaxpar train configs/quickstart.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise refuse(f"job file {path}: {error.strerror}", rule="a job is a TOML file", fix=way_out) from error
    except UnicodeDecodeError as error:
        raise refuse(f"job file {path} is no text", rule="a job is a TOML file in utf-8", fix=way_out) from error
    job, problems = _read(text, overrides, str(path))
    if not job.run.dir:
        job = dataclasses.replace(job, run=dataclasses.replace(job.run, dir=f"runs/{path.stem}"))
    return job, problems


def _read(text: str, overrides: Sequence[str], name: str) -> tuple[Job, list[Problem]]:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        way_out = 'key = value under [section]; text in "quotes"'
        raise refuse(f"{name}: {error}", rule="a job is TOML", fix=way_out) from error
    problems = [problem for override in overrides for problem in _override(raw, override)]
    job, more = _validated(raw)
    return job, problems + more


def _override(raw: dict[str, Any], text: str) -> list[Problem]:
    key, equals, value = text.partition("=")
    words = key.strip().split(".")
    if not equals or len(words) < 2 or not all(words):
        return [Problem(f"override {text!r}", "an override is section.key=value", "train.steps=100")]
    table = raw
    for word in words[:-1]:
        table = table.setdefault(word, {})
        if not isinstance(table, dict):
            return [
                Problem(f"override {text!r}: {word} is no table", "an override is section.key=value", "train.steps=100")
            ]
    try:
        table[words[-1]] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        table[words[-1]] = value.strip()
    return []


def _validated(raw: dict[str, Any]) -> tuple[Job, list[Problem]]:
    problems: list[Problem] = []
    made: dict[str, Any] = {}
    for section, table in raw.items():
        if section not in {f.name for f in dataclasses.fields(Job)}:
            fix = nearest(section, (f.name for f in dataclasses.fields(Job)))
            owners = [name for name, cls in TABLES.items() if section in {f.name for f in dataclasses.fields(cls)}]
            problems.append(
                Problem(
                    f"unknown section [{section}]"
                    if isinstance(table, dict)
                    else f"key {section!r} outside of a section",
                    "a job has the sections " + ", ".join(f.name for f in dataclasses.fields(Job)),
                    f"{section} belongs to [{owners[0]}]" if owners and not isinstance(table, dict) else fix,
                )
            )
        elif not isinstance(table, dict):
            problems.append(
                Problem(f"{section} = {table!r}", f"{section} is a section", f"[{section}] on a line of its own")
            )
        elif section == "model":
            made["model"] = {"name": "decoder", **table}
            if not isinstance(made["model"]["name"], str):
                problems.append(Problem(f"model.name = {table['name']!r}", "a model has a name", 'name = "decoder"'))
                made["model"]["name"] = "decoder"
        else:
            value, wrong = validated(TABLES[section], table, section)
            problems += wrong
            made[section] = value
    return Job(**made), problems


def validated(cls: type, table: dict[str, Any], section: str) -> tuple[Any, list[Problem]]:
    """Returns the dataclass of a table, and what is wrong with the table: every key at once.

    A key that is wrong has its default in the dataclass, so that the rest can be checked too.
    """
    adapter = _adapter(cls)
    try:
        return adapter.validate_json(json.dumps(table, default=str)), []
    except pydantic.ValidationError as error:
        wrong = error.errors()
    problems = [problem for each in wrong for problem in _problems(cls, each, section)]
    bad = {str(each["loc"][0]) for each in wrong if each["loc"]}
    rest = {key: value for key, value in table.items() if key not in bad}
    if len(rest) == len(table):  # the values do not go together: nothing of the table can be used
        return cls(), problems
    value, more = validated(cls, rest, section)
    return value, problems + more


def _adapter(cls: type) -> pydantic.TypeAdapter:
    strict = pydantic.ConfigDict(extra="forbid", strict=True)
    if "__pydantic_config__" not in vars(cls):
        cls.__pydantic_config__ = strict
    return pydantic.TypeAdapter(cls)


def _problems(cls: type, error: Any, section: str) -> list[Problem]:
    key = ".".join(str(part) for part in (section, *error["loc"]))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, JaxparError):
        return list(cause.problems)
    if error["type"] == "unexpected_keyword_argument":
        keys = [f.name for f in dataclasses.fields(cls)]
        return [
            Problem(
                f"unknown key {key}", f"[{section}] has the keys {', '.join(keys)}", nearest(str(error["loc"][0]), keys)
            )
        ]
    expected = re.sub(r"^Input should be ", "", error["msg"])
    expected = expected.replace("a valid ", "a ").replace("boolean", "boolean (true or false)")
    wrong = error["input"]
    fix = f"default: {_shown(default(cls, str(error['loc'][0])))}"
    if error["type"] == "literal_error" and isinstance(wrong, str):
        fix = nearest(wrong, re.findall(r"'([^']*)'", error["msg"]))
    return [Problem(f"{key} = {_shown(wrong)}", f"{error['loc'][0]} is {expected}", fix)]


def default(cls: type, key: str) -> Any:
    """Returns the default value of a dataclass's field."""
    made = next(f for f in dataclasses.fields(cls) if f.name == key)
    return made.default if made.default is not dataclasses.MISSING else made.default_factory()  # pyright: ignore


def meanings(cls: type) -> dict[str, str]:
    """Returns what each field of a dataclass means, from the Attributes of its docstring."""
    text = (cls.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    indent, key = None, None
    for line in text.splitlines():
        if not line.strip():
            break
        indent = indent if indent is not None else len(line) - len(line.lstrip())
        if len(line) - len(line.lstrip()) == indent:
            key, _, meaning = line.strip().partition(": ")
            found[key] = meaning
        elif key:
            found[key] += " " + line.strip()
    return found


def show_defaults(models: dict[str, type]) -> str:
    """Returns every key of a job with its default and meaning, as TOML that can be used."""
    lines = ["# Every key of a job, its default and its meaning."]
    for section, cls in TABLES.items():
        lines += ["", f"[{section}]", *_rows(cls)]
        if section == "parallel":
            lines += [
                "",
                "[model]",
                f'{"name = " + _shown("decoder"):<28}# {", ".join(models)}, or "package.module:Object"',
            ]
            for name, settings in models.items():
                lines += [f"# -- of {name}:", *("# " + row for row in _rows(settings))]
    return "\n".join(lines)


def _rows(cls: type) -> list[str]:
    rows = []
    for key, meaning in meanings(cls).items():
        if key in {f.name for f in dataclasses.fields(cls)}:
            value = default(cls, key)
            shown = f"{key} = {_shown(value)}" if value is not None else f"# {key} ="
            rows.append(f"{shown:<28}# {meaning}")
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_shown(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, default=str)


def dumps(job: Job) -> str:
    """Returns the resolved job as TOML: what `load` reads back as the same job."""
    lines = []
    for section in dataclasses.fields(Job):
        table = getattr(job, section.name)
        table = (
            dict(table)
            if isinstance(table, dict)
            else {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
        )
        lines += [
            f"[{section.name}]",
            *(f"{key} = {_shown(value)}" for key, value in table.items() if value is not None),
            "",
        ]
    return "\n".join(lines)
