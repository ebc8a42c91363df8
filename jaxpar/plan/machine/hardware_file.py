"""A user's machine in TOML: its chip, and the measurements of `jaxpar measure gemm` and `jaxpar measure links`.

[chip]                       # as in mesh/chip_file.py
name = "Acme One"
bf16_flops = 400e12
f32_flops = 50e12
memory = "64 GiB"
bandwidth = 2e12
nvlink = 100e9
source = "its sheet"
[gemm]
top = 0.7                    # share of bf16_flops that very large matmuls reach
half = 5e9                   # FLOP of the matmul that reaches half of that
cores = 100                  # optional, as the next two: cores of the chip; matmuls are then counted in tiles
wave = 1e-6                  # seconds that each wave of tiles takes to begin and to end
ragged = 0.2                 # share of the last wave's idle cores that is lost
source = "measured on acme-3"
[links]
per_node = 8                 # chips of a machine
launch = 1e-5                # seconds before a collective's first hop
inside = {latency = 3e-6, bandwidth = 80e9}       # seconds of a hop, bytes per second and direction of one chip
between = {latency = 1e-5, bandwidth = 11e9}      # to other machines; optional
source = "measured on acme-3"

Numbers may also be assumptions, for a machine that nobody has yet; state that in `source`.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.mesh.chip_file import KEYS, load_chip, read_chip_tables
from jaxpar.mesh.chips import Chip, Link
from jaxpar.plan.machine.hardware import FAR, JITTER, STREAMING, Hardware
from jaxpar.plan.machine.kernels import RANGES, Gemm
from jaxpar.plan.machine.option_texts import OptionText, flag_text

_LINK = {"latency": (0.0, 1.0, "3e-6"), "bandwidth": (1e6, 1e17, "80e9")}
_NUMBERS: Mapping[str, Mapping[str, tuple[float, float, str]]] = {  # lowest, highest, and an example
    "gemm": {"top": (1e-3, 1.0, "0.7"), "half": (0.0, 1e15, "5e9")},
    "links": {"per_node": (1, 65_536, "8"), "launch": (0.0, 1.0, "1e-5")},
}
_MAY = {
    "gemm": {key: (*RANGES[key], example) for key, example in (("cores", "132"), ("wave", "1e-6"), ("ragged", "0.2"))}
}
_TIERS = ("inside", "between")
_SAYS = {
    "gemm": "[gemm] says which share of its peak the chip reaches in matmuls",
    "links": "[links] says what joins the chips",
}


def load_hardware(
    path: str | Path, *, devices: int, per_node: int = 0, between: float = 0.0, option_text: OptionText = flag_text
) -> Hardware:
    """Loads the machines of a TOML file, for a plan on this many devices.

    Args:
      path: A file as above.
      devices: Devices of the plan.
      per_node: Devices of one machine; 0 means the file's.
      between: Bytes per second to other machines; 0 means the file's. Without `links.between` in the file the latency
        is assumed to be that of the chips in `HARDWARE`.
      option_text: Formats options in errors.

    Returns:
      The hardware. On a single machine without `links.between`, `between` equals `inside`, and nothing is sent over it.

    Raises:
      JaxparError: With all problems of the file; for a missing table, with the command that measures it.
    """
    path = Path(path)
    chip, document = load_chip(path), read_chip_tables(path)
    problems: list[Problem] = []
    checked_tables = {name: _table(name, document, path, problems) for name in _NUMBERS}
    for name in (name for name in _TIERS if name in checked_tables["links"]):
        _check_link(name, checked_tables["links"][name], path, problems)
    if problems:
        raise JaxparError(*problems)
    gemm, links = checked_tables["gemm"], checked_tables["links"]
    size = per_node or links["per_node"]
    inside, far_link = Link(**links["inside"]), Link(**links["between"]) if "between" in links else None
    if between:
        far_link = Link(latency=far_link.latency if far_link else FAR, bandwidth=between)
    if far_link is None and devices > size:
        raise refuse(
            f"no links.between in {path}, for {devices} devices on machines of {size}",
            rule="a plan over several machines needs the link between them",
            fix=f"jaxpar measure links --write {path} on two machines, or {option_text('between', '12GB')}",
        )
    return Hardware(
        chip=chip, per_node=size, inside=inside, between=far_link or inside, gemm=Gemm(**gemm), streaming=STREAMING,
        launch=links["launch"], jitter=JITTER,
        source=f"{links['source']}; {STREAMING} of the memory's bandwidth and {JITTER} of jitter assumed",
    )  # fmt: skip


def _table(name: str, read: Mapping[str, object], path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Returns a table of the file; appends unknown keys, missing keys and values out of range to the problems."""
    table, needs = read.get(name), _NUMBERS[name]
    ranges = {**needs, **_MAY.get(name, {})}
    if not isinstance(table, dict):
        problems.append(Problem(f"no table [{name}] in {path}", _SAYS[name], f"jaxpar measure {name} --write {path}"))
        return {}
    allowed = [*ranges, "source", *(_TIERS if name == "links" else ())]
    problems += [
        Problem(f"{name}.{key} in {path}", f"[{name}] has the keys {', '.join(allowed)}", suggest(key, allowed))
        for key in table
        if key not in allowed
    ]
    required = [*needs, "source", *(("inside",) if name == "links" else ())]
    for key in (key for key in required if key not in table):
        problems.append(Problem(f"no {name}.{key} in {path}", _SAYS[name], f"jaxpar measure {name} --write {path}"))
    for key in (key for key in ranges if key in table):
        _check(f"{name}.{key}", table[key], ranges[key], path, problems)
    source = table.get("source", "-")
    if not isinstance(source, str) or not source.strip():
        problems.append(Problem(f"{name}.source = {source!r:.60} in {path}", "words", 'source = "measured on acme-3"'))
    return table


def _check_link(name: str, table: object, path: Path, problems: list[Problem]) -> None:
    if not isinstance(table, dict) or set(table) != set(_LINK):
        example = "{latency = 3e-6, bandwidth = 80e9}"
        problems.append(Problem(f"links.{name} = {table!r:.60} in {path}", f"a table {example}", f"{name} = {example}"))
        return
    for key, bounds in _LINK.items():
        _check(f"links.{name}.{key}", table[key], bounds, path, problems)


def _check(key: str, value: Any, bounds: tuple[float, float, str], path: Path, problems: list[Problem]) -> None:
    low, high, example = bounds
    number = isinstance(value, int if isinstance(low, int) else int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        rule = f"a {'whole ' * isinstance(low, int)}number, {low:g} to {high:g}"
        problems.append(Problem(f"{key} = {value!r:.60} in {path}", rule, f"{key.rpartition('.')[2]} = {example}"))


def write_table(path: Path, name: str, table: Mapping[str, object], *, chip: Chip) -> None:
    """Writes or replaces one table of a chip's file; all other lines stay unchanged.

    Args:
      path: The file; a new one begins with `[chip]`.
      name: Name of the table, `gemm` or `links`.
      table: Keys in order, to numbers, text, and tables of numbers.
      chip: The chip of `[chip]` in a new file.

    Raises:
      JaxparError: If the file cannot be written, or it defines the table in several places.
    """
    old_text = path.read_text(encoding="utf-8") if path.exists() else to_toml("chip", _sheet(chip))
    lines, kept_lines, in_table = old_text.splitlines(), [], False
    for line in lines:
        header = line.strip().startswith("[")
        in_table = line.split("#")[0].strip() == f"[{name}]" if header else in_table
        kept_lines += [] if in_table else [line]
    new_text = "\n".join(kept_lines).rstrip() + "\n" + to_toml(name, table)
    try:
        unchanged = tomllib.loads(new_text) == tomllib.loads(old_text) | {name: dict(table)}
    except tomllib.TOMLDecodeError:
        unchanged = False
    if not unchanged:
        raise refuse(
            f"[{name}] in {path}",
            rule="each table of the file is written once, in one place",
            fix=f"take {name} out of {path} by hand",
        )
    try:
        new_file = path.with_name(path.name + ".new")
        new_file.write_text(new_text, encoding="utf-8")
        new_file.replace(path)
    except OSError as error:
        raise refuse(f"{path}: {error.strerror}", rule="the file can be written", fix="--write mine.toml") from error


def to_toml(name: str, table: Mapping[str, object]) -> str:
    """Formats a table as TOML.

    >>> print(to_toml("links", {"per_node": 8, "inside": {"latency": 3e-06}, "source": "acme"}), end="")
    [links]
    per_node = 8
    inside = {latency = 3e-06}
    source = "acme"
    """
    return f"[{name}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in escaped) + '"'
    return repr(value)


def _sheet(chip: Chip) -> dict[str, Any]:
    return {key: getattr(chip, key) for key in KEYS if getattr(chip, key) is not None} | {"memory": chip.visible_memory}
