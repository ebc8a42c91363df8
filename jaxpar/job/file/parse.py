"""Parses a job file into a `Job`, or reports all of its problems at once."""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic

from jaxpar import files
from jaxpar.errors import FEW, JaxparError, Problem, first_problems, refuse, suggest
from jaxpar.exchange.base import Exchange
from jaxpar.exchange.table import EXCHANGES
from jaxpar.job.file.dump import toml_value
from jaxpar.job.file.imports import expand_model_folder
from jaxpar.job.file.schema import SECTIONS, TABLES, Job, default, inner_tables, iter_tables
from jaxpar.other_names import OTHER_NAMES, OTHER_VALUES

EPOCHS: dict[str, str] = dict.fromkeys(("epochs", "num_epochs"), "train.steps = epochs x examples / train.global_batch")
MOST_BITS = 4096  # largest integer, in bits, that Python converts to digits


def load(path: str | Path, overrides: Sequence[str] = (), *, allow_import: bool = False) -> Job:
    """Loads a job from a TOML file, with `section.key=value` overrides.

    Args:
      path: The file.
      overrides: `section.key=value` strings.
      allow_import: Whether the job may import Python objects from any module: only for a job that you trust.

    Raises:
      JaxparError: With every unknown key, wrong type and value out of range at once.
    """
    return _raise_problems(*load_with_problems(path, overrides, allow_import=allow_import))


def loads(text: str, overrides: Sequence[str] = (), *, allow_import: bool = False) -> Job:
    """Loads a job from TOML text; see `load`."""
    return _raise_problems(*_read(text, overrides, "job", allow_import=allow_import))


def _raise_problems(job: Job | None, problems: list[Problem]) -> Job:
    if problems or job is None:
        raise JaxparError(*problems)
    return job


def load_with_problems(
    path: str | Path, overrides: Sequence[str] = (), *, allow_import: bool = False
) -> tuple[Job | None, list[Problem]]:
    """Returns the job of a file and its problems; a key with a problem gets its default.

    The job is None if a whole table is unusable: with its defaults it would be a different job.

    Raises:
      JaxparError: If the file cannot be read, or is not TOML.
    """
    way_out = "jaxpar train configs/quickstart.toml, or jaxpar new mine, which writes mine/job.toml"
    try:
        path = Path(path)
        with path.open(encoding="utf-8-sig") as file:  # bounded: a device or a pipe may have no end
            text = file.read(files.LARGEST_TOML + 1)
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
        raw = files.parse_toml(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of thousands of digits, or unbounded nesting
        way_out = 'key = value under [section]; text in "quotes"'
        raise refuse(f"{name}: {error}", rule="a job is TOML", fix=way_out) from error
    items = [overrides] if isinstance(overrides, str) else overrides
    problems = [problem for override in items for problem in _override(raw, override)]
    if _is_deep(raw):
        got = f"{name}: tables nested more than {files.DEEPEST_TOML} deep"
        raise refuse(got, rule="a job is sections of keys", fix=f"tables nested at most {files.DEEPEST_TOML} deep")
    if huge := next(_huge(raw), None):
        raise refuse(
            f"{name}: an integer of {huge} bits",
            rule="an integer of TOML has 64 bits",
            fix="a number below 2**63, or text in quotes",
        )
    raw, folder_problems = expand_model_folder(raw)
    job, schema_problems = _validate_job(raw)
    return job and dataclasses.replace(job, allow_import=allow_import), problems + folder_problems + schema_problems


def _is_deep(raw: dict[str, Any]) -> bool:
    level: list[Any] = [raw]
    for _ in range(files.DEEPEST_TOML):
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        level = [item for item in level if isinstance(item, (dict, list))]
    return bool(level)


def _huge(value: object) -> Iterator[int]:
    """Yields the bit lengths of integers that Python cannot print; the schema refuses smaller ones with their keys."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        yield value.bit_length()
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _huge(item)


def _override(raw: dict[str, Any], text: object) -> list[Problem]:
    if not isinstance(text, str):
        return [Problem(f"override {text!r:.60}", "an override is text, section.key=value", '"train.steps=100"')]
    key, equals, value = text.partition("=")
    words = [word.strip() for word in key.split(".")]
    if not equals or len(words) < 2 or not all(words):
        owner = (
            re.search(r"mean (.*)\?", _key_of_other_section(words[0]))
            if len(words) == 1 and key not in SECTIONS
            else None
        )
        meant = value if value and words[0].lower() not in OTHER_VALUES else "..."
        fix = EPOCHS.get(words[0].lower()) or (f"{owner[1]}={meant}" if owner else "train.steps=100")
        return [Problem(f"override {text!r:.200}", "an override is section.key=value", fix)]
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
        (table[words[-1]],) = files.parse_toml(f"value = {value}").values()  # one value: not two lines of TOML
    except (ValueError, RecursionError):
        table[words[-1]] = value.strip()
    return []


def _validate_job(raw: dict[str, Any]) -> tuple[Job | None, list[Problem]]:
    problems: list[Problem] = []
    tables: dict[str, Any] = {}
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
            tables["model"] = {"name": "decoder", **table}
            if not isinstance(tables["model"]["name"], str):
                problems.append(Problem(f"model.name = {table['name']!r}", "a model has a name", 'name = "decoder"'))
                tables["model"]["name"] = "decoder"
        else:
            value, table_problems = validate(TABLES[section], table, section)
            problems += table_problems
            tables[section] = value
    return (None if None in tables.values() else Job(**tables)), problems


def _no_section(section: str, table: object) -> Problem:
    fix = suggest(section, SECTIONS)
    owners = [name for name, cls in TABLES.items() if section in {f.name for f in dataclasses.fields(cls)}]
    inner = [name for name in TABLES if name.endswith(f".{section}")]
    if isinstance(table, dict):
        got, fix = f"unknown section [{section}]", f"[{inner[0]}]" if inner else fix
    else:
        got = f"key {section!r} outside of a section"
        fix = f"{section} belongs to [{owners[0]}]" if owners else fix
    return Problem(got, "a job has the sections " + ", ".join(SECTIONS), fix)


def validate(cls: type, table: dict[str, Any], section: str) -> tuple[Any, list[Problem]]:
    """Validates a table: returns its dataclass and the problems of all keys at once.

    A wrong key gets its default, so that the remaining keys are checked too. The dataclass is None if values that are
    valid alone contradict each other.
    """
    inner, problems = {}, []
    for key, table_class in inner_tables(cls).items():
        entry: Any = table.get(key)
        if isinstance(entry, str) and (short := getattr(table_class, "SHORT", "")):
            entry = {short: entry}
        if isinstance(entry, dict):
            kind, name_errors = _table_class(table_class, entry, f"{section}.{key}")
            inner[key], errors = validate(kind, {} if name_errors else entry, f"{section}.{key}")
            problems += [*name_errors, *errors]
    result, errors = _validate_flat(cls, {key: value for key, value in table.items() if key not in inner}, section)
    result = None if result is None or None in inner.values() else dataclasses.replace(result, **inner)
    return result, problems + errors


def _table_class(usual: type, table: dict[str, Any], section: str) -> tuple[type, list[Problem]]:
    """Returns the dataclass of a table; for an exchange, the class that its `name` selects."""
    name = table.get("name")
    if not issubclass(usual, Exchange) or name is None:
        return usual, []
    if isinstance(name, str) and name in EXCHANGES:
        return EXCHANGES[name], []
    names = ", ".join(EXCHANGES)
    return usual, [
        Problem(f"{section}.name = {toml_value(name):.300}", f"one of {names}", suggest(str(name), EXCHANGES))
    ]


def _validate_flat(cls: type, table: dict[str, Any], section: str) -> tuple[Any, list[Problem]]:
    adapter, keys = _adapter(cls), [f.name for f in dataclasses.fields(cls)]
    if surplus := [key for key in table if key not in keys][FEW:]:  # a suggestion compares each with all keys
        first_keys = dict.fromkeys(table.keys() - set(surplus))
        value, problems = _validate_flat(cls, {key: table[key] for key in table if key in first_keys}, section)
        rule = f"[{section}] has the keys {', '.join(keys)}"
        return value, [*problems, Problem(f"{len(surplus)} more unknown keys in [{section}]", rule, "leave them out")]
    try:
        return adapter.validate_json(
            json.dumps(table, default=str, ensure_ascii=False)
            .encode("utf-8", "surrogatepass")
            .decode("utf-8", "replace")
        ), []
    except pydantic.ValidationError as error:
        errors = error.errors()
    messages = [problem for item in errors for problem in _problems(cls, item, section)]
    problems = list({problem.got: problem for problem in messages}.values())  # a union reports once per member
    bad = {str(item["loc"][0]) for item in errors if item["loc"]}
    bad |= {key for key in table for problem in problems if problem.got.startswith(f"{section}.{key} = ")}
    valid_part = {key: value for key, value in table.items() if key not in bad}
    if len(valid_part) == len(table):  # the values contradict each other: nothing of the table can be used
        return None, problems
    value, effects = _validate_flat(cls, valid_part, section)
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, bad))})\b")  # problems caused by removed keys are no news
    return value, problems + [problem for problem in effects if not pattern.search(f"{problem.got} {problem.fix}")]


def _adapter(cls: type) -> pydantic.TypeAdapter:
    strict = pydantic.ConfigDict(extra="forbid", strict=True)
    if "__pydantic_config__" not in vars(cls):
        cls.__pydantic_config__ = strict
    return pydantic.TypeAdapter(cls)


# pydantic's name of a member of a union to what the key takes
_UNIONS = {
    "literal['found']": "a list of whole numbers, or 'found'",
    "tuple[int": "a list of whole numbers, or 'found'",
}


def _key_of_other_section(word: str) -> str:
    """Returns the key that a word names, if one section alone has it; else ""."""
    key = OTHER_NAMES.get(word.lower(), word)
    owners = [
        section
        for section, cls in TABLES.items()
        if "." not in section and key in {field.name for field in dataclasses.fields(cls)}
    ]
    return f"did you mean {owners[0]}.{key}?" if len(owners) == 1 else ""


def _convert(got: object, usual: object, kind: object) -> Any:
    """Returns a value of the type that a key takes if the user's is one in another form, else None.

    Args:
      got: The user's value.
      usual: The default.
      kind: The annotation of the key.
    """
    if isinstance(got, str) and isinstance(usual, (int, float)):
        try:
            got = float(got)
        except ValueError:
            return None
    if type(usual) is int and type(got) is float and got.is_integer() and abs(got) < 2**53:
        return int(got)
    if isinstance(got, str) and got and typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return [got] if item is str or got in typing.get_args(item) else None
    return got if type(usual) is float and type(got) is float and math.isfinite(got) else None


def _problems(cls: type, error: Any, section: str) -> list[Problem]:
    parts = [
        part for part in error["loc"] if not re.match(r"str$|list\[|tuple\[|literal\[", str(part))
    ]  # without pydantic's names of union members
    key = ".".join(str(part) for part in (section, *parts))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, JaxparError):
        return list(cause.problems)
    if error["type"] == "unexpected_keyword_argument":
        keys, word = [f.name for f in dataclasses.fields(cls)], str(error["loc"][0])
        owners = [
            name for name, inner in iter_tables(cls, section) if word in {f.name for f in dataclasses.fields(inner)}
        ]
        is_elsewhere = OTHER_NAMES.get(word.lower(), word) not in keys and word.lower() in OTHER_NAMES
        meant = (is_elsewhere and _key_of_other_section(word)) or suggest(
            word, keys, otherwise=_key_of_other_section(word)
        )
        fix = f"{word} belongs to [{owners[0]}]" if owners else EPOCHS.get(word.lower(), meant)
        return [Problem(f"unknown key {key}", f"[{section}] has the keys {', '.join(keys)}", fix)]
    expected = re.sub(r"^Input should be ", "", error["msg"])
    expected = re.sub(r"\ba (?:valid )?(integer|array|object)", r"an \1", expected).replace("a valid ", "a ")
    expected = (
        expected.replace("boolean", "boolean (true or false)")
        .replace("an array", "a list")
        .replace("an object", "a table")
    )
    member = next((str(part) for part in error["loc"] if part not in parts), "")
    if member and len(parts) == 1:
        expected = next(
            (words for start, words in _UNIONS.items() if member.startswith(start)), "text or a list of text"
        )
    got = error["input"]
    default_value = default(cls, str(error["loc"][0]))
    fix = (
        "leave it out"
        if default_value is None or default_value in ("", {})
        else f"default: {toml_value(default_value)}"
    )
    kind = typing.get_type_hints(cls)[str(error["loc"][0])]
    if len(parts) == 1 and (converted := _convert(got, default_value, kind)) is not None:
        fix = f"{parts[0]} = {toml_value(converted)}"
    if dataclasses.is_dataclass(default_value):
        expected, fix = "a table", f"[{key}] on a line of its own"
    if error["type"] == "literal_error" and isinstance(got, str):
        fix = suggest(got, re.findall(r"'([^']*)'", error["msg"]))
    return [Problem(f"{key} = {toml_value(got):.300}", f"{key.removeprefix(section + '.')} is {expected}", fix)]


# The job files that jaxpar ships, so that `configs/quickstart.toml` names one in any folder; in a checkout, a link.
CONFIGS = Path(__file__).parents[2] / "configs"


def shipped_job(path: Path) -> Path | None:
    """Returns the shipped file that a path below `configs/` names; None if the path exists, or no such file does."""
    shipped = CONFIGS.joinpath(*path.parts[1:])
    return None if path.exists() or path.parts[:1] != ("configs",) or not shipped.is_file() else shipped


def replacement_note(name: str | Path) -> str:
    """Reports that a shipped file takes the place of a missing one, without a path of this machine."""
    return f"{name}: not in this folder; taken from the installed jaxpar/{Path(name)}"
