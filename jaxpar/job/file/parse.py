"""The text of a job becomes a `Job`, or every problem at once."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic

from jaxpar import toml
from jaxpar.errors import FEW, JaxparError, Problem, first_problems, nearest, refuse
from jaxpar.exchange.base import Exchange
from jaxpar.exchange.table import EXCHANGES
from jaxpar.job.file.dump import shown
from jaxpar.job.file.folder import unfolded
from jaxpar.job.file.schema import SECTIONS, TABLES, Job, default, inner_tables, walk

PRINTED = 4096  # bits of an integer that Python turns into digits


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
    """Returns the job of a file and its problems; a key with a problem has its default in the job.

    The job is None where a whole table makes no sense: its defaults would be another job.

    Raises:
      JaxparError: If the file cannot be read, or is no TOML.
    """
    way_out = "jaxpar train configs/quickstart.toml, or jaxpar new mine, which writes mine/job.toml"
    try:
        path = Path(path)
        with path.open(encoding="utf-8-sig") as file:  # a device or a pipe may have no end
            text = file.read(toml.LARGEST + 1)
    except (OSError, TypeError) as error:
        reason = getattr(error, "strerror", error)
        raise refuse(f"job file {path!s:.200}: {reason}", rule="a job is a TOML file", fix=way_out) from error
    except ValueError as error:  # no utf-8, or a null byte in the path
        raise refuse(f"job file {path} is no text", rule="a job is a TOML file in utf-8", fix=way_out) from error
    job, problems = _read(text, overrides, str(path), allow_import=allow_import)
    if job and not job.run.dir:
        job = dataclasses.replace(job, run=dataclasses.replace(job.run, dir=f"runs/{path.stem}"))
    return job, problems


def _read(text: str, overrides: Sequence[str], name: str, *, allow_import: bool) -> tuple[Job | None, list[Problem]]:
    try:
        raw = toml.loads(text)
    except (ValueError, RecursionError) as error:  # no TOML, a number of thousands of digits, or brackets without end
        way_out = 'key = value under [section]; text in "quotes"'
        raise refuse(f"{name}: {error}", rule="a job is TOML", fix=way_out) from error
    each = [overrides] if isinstance(overrides, str) else overrides
    problems = [problem for override in each for problem in _override(raw, override)]
    if _is_deep(raw):
        got = f"{name}: more than {toml.DEEPEST} tables in each other"
        raise refuse(got, rule="a job is sections of keys", fix=f"at most {toml.DEEPEST} in each other")
    if huge := next(_huge(raw), None):
        raise refuse(
            f"{name}: an integer of {huge} bits",
            rule="an integer of TOML has 64 bits",
            fix="a number below 2**63, or text in quotes",
        )
    raw, unread = unfolded(raw)
    job, more = _validated(raw)
    return job and dataclasses.replace(job, allow_import=allow_import), problems + unread + more


def _is_deep(raw: dict[str, Any]) -> bool:
    level: list[Any] = [raw]
    for _ in range(toml.DEEPEST):
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in level if isinstance(each, (dict, list))]
    return bool(level)


def _huge(value: Any) -> Iterator[int]:
    """Yields the bits of integers that Python would not even print; smaller ones are refused with their keys."""
    if isinstance(value, int) and value.bit_length() > PRINTED:
        yield value.bit_length()
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _huge(each)


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
        (table[words[-1]],) = toml.loads(f"value = {value}").values()  # one value: not two lines of TOML
    except (ValueError, RecursionError):
        table[words[-1]] = value.strip()
    return []


def _validated(raw: dict[str, Any]) -> tuple[Job | None, list[Problem]]:
    problems: list[Problem] = []
    made: dict[str, Any] = {}
    problems += first_problems(
        [name for name in raw if name not in SECTIONS], lambda name: _no_section(name, raw[name])
    )
    for section in (name for name in raw if name in SECTIONS):
        table = raw[section]
        if not isinstance(table, dict):
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


def _no_section(section: str, table: Any) -> Problem:
    fix = nearest(section, SECTIONS)
    owners = [name for name, cls in TABLES.items() if section in {f.name for f in dataclasses.fields(cls)}]
    inner = [name for name in TABLES if name.endswith(f".{section}")]
    if isinstance(table, dict):
        got, fix = f"unknown section [{section}]", f"[{inner[0]}]" if inner else fix
    else:
        got = f"key {section!r} outside of a section"
        fix = f"{section} belongs to [{owners[0]}]" if owners else fix
    return Problem(got, "a job has the sections " + ", ".join(SECTIONS), fix)


def validated(cls: type, table: dict[str, Any], section: str) -> tuple[Any, list[Problem]]:
    """Returns the dataclass of a table and the problems of the table: every key at once.

    A key that is wrong has its default in the dataclass, so that the rest can be checked too. The
    dataclass is None where values that are right alone do not go together.
    """
    inner, problems = {}, []
    for key, usual in inner_tables(cls).items():
        given: Any = table.get(key)
        if isinstance(given, str) and (short := getattr(usual, "SHORT", "")):
            given = {short: given}
        if isinstance(given, dict):
            kind, problem = _named(usual, given, f"{section}.{key}")
            inner[key], more = validated(kind, {} if problem else given, f"{section}.{key}")
            problems += [*problem, *more]
    made, more = _validated_flat(cls, {key: value for key, value in table.items() if key not in inner}, section)
    made = None if made is None or None in inner.values() else dataclasses.replace(made, **inner)
    return made, problems + more


def _named(usual: type, table: dict[str, Any], section: str) -> tuple[type, list[Problem]]:
    """Returns the dataclass of a table: of an exchange the one that it names."""
    name = table.get("name")
    if not issubclass(usual, Exchange) or name is None:
        return usual, []
    if isinstance(name, str) and name in EXCHANGES:
        return EXCHANGES[name], []
    known = ", ".join(EXCHANGES)
    return usual, [Problem(f"{section}.name = {shown(name):.300}", f"one of {known}", nearest(str(name), EXCHANGES))]


def _validated_flat(cls: type, table: dict[str, Any], section: str) -> tuple[Any, list[Problem]]:
    adapter, keys = _adapter(cls), [f.name for f in dataclasses.fields(cls)]
    if many := [key for key in table if key not in keys][FEW:]:  # each would be compared with all keys there are
        left = dict.fromkeys(table.keys() - set(many))
        value, problems = _validated_flat(cls, {key: table[key] for key in table if key in left}, section)
        rule = f"[{section}] has the keys {', '.join(keys)}"
        return value, [*problems, Problem(f"{len(many)} more unknown keys in [{section}]", rule, "leave them out")]
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
        owners = [name for name, inner in walk(cls, section) if word in {f.name for f in dataclasses.fields(inner)}]
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
    fix = "leave it out" if usual is None or usual in ("", {}) else f"default: {shown(usual)}"
    if dataclasses.is_dataclass(usual):
        expected, fix = "a table", f"[{key}] on a line of its own"
    if error["type"] == "literal_error" and isinstance(wrong, str):
        fix = nearest(wrong, re.findall(r"'([^']*)'", error["msg"]))
    return [Problem(f"{key} = {shown(wrong):.300}", f"{key.removeprefix(section + '.')} is {expected}", fix)]
