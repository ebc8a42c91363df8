"""The text of a job becomes a `Job`, or every problem at once.

Each table of the file is a dataclass of the room it belongs to, a table within it a dataclass
among that one's fields; what its keys mean is read off the docstring, so it is written once.
"""

import dataclasses
import datetime
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pydantic

from jaxpar.errors import JaxparError, Problem, nearest, refuse, within
from jaxpar.mesh.target import parse_target
from jaxpar.optim.chain import Optimizer
from jaxpar.parallel.declare import Parallel
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.data.spec import Data
from jaxpar.train.faults import Faults
from jaxpar.train.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """Where a run lives.

    Attributes:
      dir: The run folder; "" means runs/ and the name of the job file.
      resume: auto goes on from the latest checkpoint if there is one; never starts anew and
        refuses a folder that has checkpoints; must refuses a folder that has none.
      timeout: Seconds without a sign of life from another process, or in which it keeps the others
        waiting, after which the run ends and says so. Compiling and saving may take ten times as long.
    """

    dir: str = ""
    resume: Literal["auto", "never", "must"] = "auto"
    timeout: float = 30.0

    def __post_init__(self):
        within(self, "run", {"timeout": (1.0, 86400.0)})


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """Which devices a job uses.

    Attributes:
      simulate: So many simulated devices on the processor; 0 means the real ones.
      devices: So many real devices, the first ones; 0 means all. `jaxpar check` believes it
        on a machine that has fewer.
      target: The GPUs the job is meant for, CHIP:NODESxGPUS such as h100:16x8; `jaxpar inspect`
        compiles for them, there or not.
    """

    simulate: int = 0
    devices: int = 0
    target: str = ""

    def __post_init__(self):
        if self.target and (meant := parse_target(self.target).devices) != (self.devices or meant):
            raise refuse(
                f"mesh.target = {self.target!r} and mesh.devices = {self.devices}",
                rule="the GPUs of the target are the devices of the job",
                fix=f"mesh.devices = {meant}, or leave it out",
            )
        within(self, "mesh", {"simulate": (0, 2**16), "devices": (0, 2**31 - 1)})
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
        most = 2**31 - 1  # the step is an int32; a seed has 32 bits
        lows = {"steps": 1, "global_batch": 1, "accumulate": 1, "seed": 0, "eval_every": 0, "eval_batches": 0}
        within(self, "train", {key: (low, most) for key, low in lows.items()})


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
      faults: What is done about numbers that go wrong.
      metrics: What is written down.
      allow_import: Whether the Python objects it names may come from anywhere, and not only from the working
        directory's own modules; no key of a file, but said by who loads it.
    """

    run: RunTable = field(default_factory=RunTable)
    mesh: MeshTable = field(default_factory=MeshTable)
    parallel: Parallel = field(default_factory=Parallel)
    model: dict[str, Any] = field(default_factory=lambda: {"name": "decoder"})
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: TrainTable = field(default_factory=TrainTable)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    faults: Faults = field(default_factory=Faults)
    metrics: Metrics = field(default_factory=Metrics)
    allow_import: bool = False


def inner_tables(cls: type) -> dict[str, type]:
    """Returns the fields of a dataclass that are tables themselves."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if dataclasses.is_dataclass(hints[f.name])}


def _walk(cls: type, section: str) -> Iterator[tuple[str, type]]:
    yield section, cls
    for key, inner in inner_tables(cls).items():
        yield from _walk(inner, f"{section}.{key}")


DEEPEST = 20  # tables and lists in each other
SECTIONS = tuple(f.name for f in dataclasses.fields(Job) if f.name != "allow_import")
TABLES: dict[str, type] = {
    name: table for section, cls in inner_tables(Job).items() for name, table in _walk(cls, section)
}


def load(path: str | Path, overrides: Sequence[str] = (), *, allow_import: bool = False) -> Job:
    """Returns the job of a TOML file, with `section.key=value` overrides.

    Args:
      path: The file.
      overrides: Each `section.key=value`.
      allow_import: Whether the Python objects it names may come from anywhere: only for a job that you trust.

    Raises:
      JaxparError: With every unknown key, wrong type and value out of range at once.
    """
    return _whole(*read(path, overrides, allow_import=allow_import))


def loads(text: str, overrides: Sequence[str] = (), *, allow_import: bool = False) -> Job:
    """Returns the job of a TOML text; see `load`."""
    return _whole(*_read(text, overrides, "job", allow_import=allow_import))


def _whole(job: Job | None, problems: list[Problem]) -> Job:
    if problems or job is None:
        raise JaxparError(*problems)
    return job


def read(
    path: str | Path, overrides: Sequence[str] = (), *, allow_import: bool = False
) -> tuple[Job | None, list[Problem]]:
    """Returns the job of a file and what is wrong with it; what is wrong has its default in the job.

    The job is None where a whole table makes no sense: its defaults would be another job.

    Raises:
      JaxparError: If the file cannot be read, or is no TOML.
    """
    way_out = "jaxpar train configs/quickstart.toml"
    try:
        path = Path(path)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, TypeError) as error:
        said = getattr(error, "strerror", error)
        raise refuse(f"job file {path!s:.200}: {said}", rule="a job is a TOML file", fix=way_out) from error
    except ValueError as error:  # no utf-8, or a null byte in the path
        raise refuse(f"job file {path} is no text", rule="a job is a TOML file in utf-8", fix=way_out) from error
    job, problems = _read(text, overrides, str(path), allow_import=allow_import)
    if job and not job.run.dir:
        job = dataclasses.replace(job, run=dataclasses.replace(job.run, dir=f"runs/{path.stem}"))
    return job, problems


def _read(text: str, overrides: Sequence[str], name: str, *, allow_import: bool) -> tuple[Job | None, list[Problem]]:
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # no TOML, a number of thousands of digits, or brackets without end
        way_out = 'key = value under [section]; text in "quotes"'
        raise refuse(f"{name}: {error}", rule="a job is TOML", fix=way_out) from error
    each = [overrides] if isinstance(overrides, str) else overrides
    problems = [problem for override in each for problem in _override(raw, override)]
    if _is_deep(raw):
        raise refuse(f"{name}: more than {DEEPEST} tables in each other", rule="a job is sections of keys", fix="fewer")
    job, more = _validated(raw)
    return job and dataclasses.replace(job, allow_import=allow_import), problems + more


def _is_deep(raw: dict[str, Any]) -> bool:
    level: list[Any] = [raw]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in level if isinstance(each, (dict, list))]
    return bool(level)


def _override(raw: dict[str, Any], text: str) -> list[Problem]:
    key, equals, value = text.partition("=")
    words = [word.strip() for word in key.split(".")]
    if not equals or len(words) < 2 or not all(words):
        return [Problem(f"override {text!r:.200}", "an override is section.key=value", "train.steps=100")]
    table = raw
    for word in words[:-1]:
        table = table.setdefault(word, {})
        if not isinstance(table, dict):
            return [
                Problem(
                    f"override {text!r:.200}: {word:.100} is no table",
                    "an override is section.key=value",
                    "train.steps=100",
                )
            ]
    try:
        (table[words[-1]],) = tomllib.loads(f"value = {value}").values()  # one value: not two lines of TOML
    except (ValueError, RecursionError):
        table[words[-1]] = value.strip()
    return []


def _validated(raw: dict[str, Any]) -> tuple[Job | None, list[Problem]]:
    problems: list[Problem] = []
    made: dict[str, Any] = {}
    for section, table in raw.items():
        if section not in SECTIONS:
            fix = nearest(section, SECTIONS)
            owners = [name for name, cls in TABLES.items() if section in {f.name for f in dataclasses.fields(cls)}]
            inner = [name for name in TABLES if name.endswith(f".{section}")]
            if isinstance(table, dict):
                got, fix = f"unknown section [{section}]", f"[{inner[0]}]" if inner else fix
            else:
                got = f"key {section!r} outside of a section"
                fix = f"{section} belongs to [{owners[0]}]" if owners else fix
            sections = "a job has the sections " + ", ".join(SECTIONS)
            problems.append(Problem(got, sections, fix))
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
    return (None if None in made.values() else Job(**made)), problems


def validated(cls: type, table: dict[str, Any], section: str) -> tuple[Any, list[Problem]]:
    """Returns the dataclass of a table, and what is wrong with the table: every key at once.

    A key that is wrong has its default in the dataclass, so that the rest can be checked too. The
    dataclass is None where values that are right alone do not go together.
    """
    inner, problems = {}, []
    for key, kind in inner_tables(cls).items():
        if isinstance(table.get(key), dict):
            inner[key], more = validated(kind, table[key], f"{section}.{key}")
            problems += more
    made, more = _validated_flat(cls, {key: value for key, value in table.items() if key not in inner}, section)
    made = None if made is None or None in inner.values() else dataclasses.replace(made, **inner)
    return made, problems + more


def _validated_flat(cls: type, table: dict[str, Any], section: str) -> tuple[Any, list[Problem]]:
    adapter = _adapter(cls)
    try:
        return adapter.validate_json(
            json.dumps(table, default=str, ensure_ascii=False)
            .encode("utf-8", "surrogatepass")
            .decode("utf-8", "replace")
        ), []
    except pydantic.ValidationError as error:
        wrong = error.errors()
    found = [problem for each in wrong for problem in _problems(cls, each, section)]
    problems = list({problem.got: problem for problem in found}.values())  # a union says it once per member
    bad = {str(each["loc"][0]) for each in wrong if each["loc"]}
    bad |= {key for key in table for problem in problems if problem.got.startswith(f"{section}.{key} = ")}
    rest = {key: value for key, value in table.items() if key not in bad}
    if len(rest) == len(table):  # the values do not go together: nothing of the table can be used
        return None, problems
    value, more = _validated_flat(cls, rest, section)
    told = re.compile(rf"\b({'|'.join(map(re.escape, bad))})\b")  # what follows from a key taken out is no news
    return value, problems + [problem for problem in more if not told.search(f"{problem.got} {problem.fix}")]


def _adapter(cls: type) -> pydantic.TypeAdapter:
    strict = pydantic.ConfigDict(extra="forbid", strict=True)
    if "__pydantic_config__" not in vars(cls):
        cls.__pydantic_config__ = strict
    return pydantic.TypeAdapter(cls)


def _problems(cls: type, error: Any, section: str) -> list[Problem]:
    own = [
        part for part in error["loc"] if not re.match(r"str$|list\[|tuple\[", str(part))
    ]  # not pydantic's members of a union
    key = ".".join(str(part) for part in (section, *own))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, JaxparError):
        return list(cause.problems)
    if error["type"] == "unexpected_keyword_argument":
        keys, word = [f.name for f in dataclasses.fields(cls)], str(error["loc"][0])
        owners = [name for name, inner in _walk(cls, section) if word in {f.name for f in dataclasses.fields(inner)}]
        fix = f"{word} belongs to [{owners[0]}]" if owners else nearest(word, keys)
        return [Problem(f"unknown key {key}", f"[{section}] has the keys {', '.join(keys)}", fix)]
    expected = re.sub(r"^Input should be ", "", error["msg"])
    expected = re.sub(r"\ba (?:valid )?(integer|array|object)", r"an \1", expected).replace("a valid ", "a ")
    expected = (
        expected.replace("boolean", "boolean (true or false)")
        .replace("an array", "a list")
        .replace("an object", "a table")
    )
    if len(own) < len(error["loc"]):
        expected = "text or a list of text"
    wrong = error["input"]
    usual = default(cls, str(error["loc"][0]))
    fix = "leave it out" if usual is None or usual in ("", {}) else f"default: {_shown(usual)}"
    if dataclasses.is_dataclass(usual):
        expected, fix = "a table", f"[{key}] on a line of its own"
    if error["type"] == "literal_error" and isinstance(wrong, str):
        fix = nearest(wrong, re.findall(r"'([^']*)'", error["msg"]))
    return [Problem(f"{key} = {_shown(wrong):.300}", f"{key.removeprefix(section + '.')} is {expected}", fix)]


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
    model = ["", "[model]", f'{"name = " + _shown("decoder"):<28}# {", ".join(models)}, or "package.module:Object"']
    for name, settings in models.items():
        model += [f"# -- of {name}:", *("# " + row for row in _rows(settings))]
    for section, cls in TABLES.items():
        lines += [*(model if section == "data" else ()), "", f"[{section}]", *_rows(cls)]
    return "\n".join(lines)


def _rows(cls: type) -> list[str]:
    rows = []
    for key, meaning in meanings(cls).items():
        if key in {f.name for f in dataclasses.fields(cls)} - inner_tables(cls).keys():
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
        return "{" + ", ".join(f"{_key(k)} = {_shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (int, float)):
        return repr(value)  # also inf and nan, which JSON spells otherwise
    return "null" if value is None else _text(str(value))


def _text(value: str) -> str:
    """Returns text as TOML writes it: as JSON does, but for the pairs of surrogates and the last control character."""
    shown = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return shown.encode("utf-8", "replace").decode()


def _key(word: str) -> str:
    """Returns a key as TOML writes it: bare where it may be."""
    return word if re.fullmatch(r"[\w-]+", word, re.ASCII) else _text(word)


def dumps(job: Job) -> str:
    """Returns the resolved job as TOML: what `load` reads back as the same job."""
    return "\n".join(line for name in SECTIONS for line in _table(name, getattr(job, name)))


def _table(section: str, value: Any) -> list[str]:
    """Returns a table, and the tables within it after its own keys."""
    own = value if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    inner = {key: each for key, each in own.items() if dataclasses.is_dataclass(each)}
    rows = [f"{_key(key)} = {_shown(each)}" for key, each in own.items() if each is not None and key not in inner]
    below = [line for key, each in inner.items() for line in _table(f"{section}.{key}", each)]
    return [f"[{section}]", *rows, "", *below]
