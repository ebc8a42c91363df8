"""A machine of the user's own, in TOML: its chip, and the results of `jaxpar measure gemm` and `jaxpar measure links`.

[chip]                       # as in mesh/chip_file.py
name = "Acme One"
bf16_flops = 400e12
f32_flops = 50e12
memory = "64 GiB"
bandwidth = 2e12
nvlink = 100e9
source = "its sheet"
[gemm]
top = 0.7                    # share of bf16_flops that matmuls without end reach
half = 5e9                   # FLOP of the matmul that reaches half of that
cores = 100                  # may be left out, as the next two: of the chip, and then matmuls are counted in tiles
wave = 1e-6                  # seconds that each wave of tiles takes to begin and to end
ragged = 0.2                 # share of the last wave's idle cores that is lost
source = "measured on acme-3"
[links]
per_node = 8                 # chips of a machine
launch = 1e-5                # seconds before a collective's first hop
inside = {latency = 3e-6, bandwidth = 80e9}       # seconds of a hop, bytes per second one way of one chip
between = {latency = 1e-5, bandwidth = 11e9}      # to other machines; may be left out
source = "measured on acme-3"

Numbers may as well be assumptions, where nobody has the machine yet: `source` says which they are.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem, nearest, refuse
from jaxpar.mesh.chip_file import KEYS, load_chip, tables
from jaxpar.mesh.chips import Chip
from jaxpar.mesh.links import Link
from jaxpar.plan.machine.gemm import RANGES, Gemm
from jaxpar.plan.machine.hardware import FAR, JITTER, STREAMING, Hardware

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


def load_hardware(path: str | Path, *, devices: int, per_node: int = 0, between: float = 0.0) -> Hardware:
    """Returns the machines of a TOML file, for a plan on so many devices.

    Args:
      path: A file as above.
      devices: How many the plan is for.
      per_node: How many of them are one machine's; 0 is the file's.
      between: Bytes per second to other machines, in place of the file's; 0 is the file's. Without `links.between`
        in the file the latency is assumed as on the chips of `HARDWARE`.

    Returns:
      The hardware. On one machine alone, and without `links.between`, `between` is `inside`: nothing is sent over it.

    Raises:
      JaxparError: With all that is wrong; a missing table comes with the bench that measures it.
    """
    path = Path(path)
    chip, read = load_chip(path), tables(path)
    problems: list[Problem] = []
    found = {name: _table(name, read, path, problems) for name in _NUMBERS}
    for name in (name for name in _TIERS if name in found["links"]):
        _check_link(name, found["links"][name], path, problems)
    if problems:
        raise JaxparError(*problems)
    gemm, links = found["gemm"], found["links"]
    size = per_node or links["per_node"]
    inside, far = Link(**links["inside"]), Link(**links["between"]) if "between" in links else None
    if between:
        far = Link(latency=far.latency if far else FAR, bandwidth=between)
    if far is None and devices > size:
        raise refuse(
            f"no links.between in {path}, for {devices} devices on machines of {size}",
            rule="a plan over several machines knows what joins them",
            fix=f"jaxpar measure links --write {path} on two machines, or --between 12GB",
        )
    return Hardware(
        chip=chip, per_node=size, inside=inside, between=far or inside, gemm=Gemm(**gemm), streaming=STREAMING,
        launch=links["launch"], jitter=JITTER,
        source=f"{links['source']}; {STREAMING} of the memory's bandwidth and {JITTER} of jitter assumed",
    )  # fmt: skip


def _table(name: str, read: Mapping[str, Any], path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Returns a table whose numbers are within their ranges; adds what is wrong to the problems."""
    table, needs = read.get(name), _NUMBERS[name]
    ranges = {**needs, **_MAY.get(name, {})}
    if not isinstance(table, dict):
        problems.append(Problem(f"no table [{name}] in {path}", _SAYS[name], f"jaxpar measure {name} --write {path}"))
        return {}
    known = [*ranges, "source", *(_TIERS if name == "links" else ())]
    problems += [
        Problem(f"{name}.{key} in {path}", f"[{name}] has the keys {', '.join(known)}", nearest(key, known))
        for key in table
        if key not in known
    ]
    needed = [*needs, "source", *(("inside",) if name == "links" else ())]
    for key in (key for key in needed if key not in table):
        problems.append(Problem(f"no {name}.{key} in {path}", _SAYS[name], f"jaxpar measure {name} --write {path}"))
    for key in (key for key in ranges if key in table):
        _check(f"{name}.{key}", table[key], ranges[key], path, problems)
    source = table.get("source", "-")
    if not isinstance(source, str) or not source.strip():
        problems.append(Problem(f"{name}.source = {source!r:.60} in {path}", "words", 'source = "measured on acme-3"'))
    return table


def _check_link(name: str, table: Any, path: Path, problems: list[Problem]) -> None:
    if not isinstance(table, dict) or set(table) != set(_LINK):
        shown = "{latency = 3e-6, bandwidth = 80e9}"
        problems.append(Problem(f"links.{name} = {table!r:.60} in {path}", f"a table {shown}", f"{name} = {shown}"))
        return
    for key, bounds in _LINK.items():
        _check(f"links.{name}.{key}", table[key], bounds, path, problems)


def _check(key: str, value: Any, bounds: tuple[float, float, str], path: Path, problems: list[Problem]) -> None:
    low, high, example = bounds
    number = isinstance(value, int if isinstance(low, int) else int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        rule = f"a {'whole ' * isinstance(low, int)}number, {low:g} to {high:g}"
        problems.append(Problem(f"{key} = {value!r:.60} in {path}", rule, f"{key.rpartition('.')[2]} = {example}"))


def write_table(path: Path, name: str, table: Mapping[str, Any], *, chip: Chip) -> None:
    """Writes one table into a chip's file; all others in it stay as they are, to the letter.

    Args:
      path: The file; one that is not there begins with `[chip]`.
      name: Which table, `gemm` or `links`; takes the place of one of that name.
      table: Its keys, in order: numbers, words, and tables of numbers.
      chip: What `[chip]` says in a new file.

    Raises:
      JaxparError: If it cannot be written, or the table there is spread over the file.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else text("chip", _sheet(chip))
    lines, kept, own = before.splitlines(), [], False
    for line in lines:
        header = line.strip().startswith("[")
        own = line.split("#")[0].strip() == f"[{name}]" if header else own
        kept += [] if own else [line]
    after = "\n".join(kept).rstrip() + "\n" + text(name, table)
    try:
        whole = tomllib.loads(after) == tomllib.loads(before) | {name: dict(table)}
    except tomllib.TOMLDecodeError:
        whole = False
    if not whole:
        raise refuse(
            f"[{name}] in {path}",
            rule="each table of the file is written once, in one place",
            fix=f"take {name} out of {path} by hand",
        )
    try:
        made = path.with_name(path.name + ".new")
        made.write_text(after, encoding="utf-8")
        made.replace(path)
    except OSError as error:
        raise refuse(f"{path}: {error.strerror}", rule="the file can be written", fix="--write mine.toml") from error


def text(name: str, table: Mapping[str, Any]) -> str:
    """Returns a table as TOML writes it.

    >>> print(text("links", {"per_node": 8, "inside": {"latency": 3e-06}, "source": "acme"}), end="")
    [links]
    per_node = 8
    inside = {latency = 3e-06}
    source = "acme"
    """
    return f"[{name}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)


def _sheet(chip: Chip) -> dict[str, Any]:
    """Returns a chip as its table in a file; memory is what the driver reports, where that is known."""
    return {key: getattr(chip, key) for key in KEYS if getattr(chip, key) is not None} | {"memory": chip.visible}
