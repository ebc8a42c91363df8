"""Reads a user's own chip from TOML, for the planner.
The file may also have [gemm] and [links], measurements on the chip, which `plan/machine/hardware_file.py` reads.

[chip]
name = "Acme One"
bf16_flops = 400e12          # FLOP per second, dense, adding in float32
f32_flops = 50e12            # FLOP per second of float32 matmuls
memory = "64 GiB"
bandwidth = 2e12             # bytes per second of device memory
nvlink = 100e9               # bytes per second one way, per chip, inside a machine; 0 where only PCIe joins them
pcie = 32e9                  # bytes per second one way, per chip, to its host; may be left out, unless nvlink is 0
source = "measured on acme-3"
network = 12.5e9             # bytes per second one way, per chip, between machines; may be left out
domain = 8                   # chips of a machine; may be left out
"""

import math
from pathlib import Path
from typing import Any

from jaxpar import files
from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.mesh.chips import Chip
from jaxpar.units import parse_bytes

_RATES = {  # lowest and highest plausible value, unit, example: a number without its 1e12 is out of range
    "bf16_flops": (1e9, 1e19, "FLOP per second", "400e12"),
    "f32_flops": (1e9, 1e19, "FLOP per second", "50e12"),
    "bandwidth": (1e6, 1e17, "bytes per second", "2e12"),
    "nvlink": (1e6, 1e17, "bytes per second", "100e9"),
    "network": (1e6, 1e17, "bytes per second", "12.5e9"),
    "pcie": (1e6, 1e17, "bytes per second", "32e9"),
}
_WORDS = ("name", "source")
_LEFT_OUT = ("network", "pcie", "domain")
KEYS = (*_WORDS, "memory", *_RATES, "domain")
MEASURED = ("gemm", "links")  # tables of the same file that other modules read


def load_chip(path: str | Path) -> Chip:
    """Reads the chip of a TOML file; its key is the name of the file.

    Args:
      path: A file with a table `[chip]`, as above.

    Raises:
      JaxparError: If the file cannot be read, or with all problems of the table at once.
    """
    path = Path(path)
    table = read_chip_tables(path)["chip"]
    problems = [
        Problem(f"chip.{key} in {path}", f"[chip] has the keys {', '.join(KEYS)}", suggest(key, KEYS))
        for key in table
        if key not in KEYS
    ]
    values: dict[str, Any] = {}
    for key in KEYS:
        if key not in table:
            if key not in _LEFT_OUT:
                problems.append(Problem(f"no chip.{key} in {path}", "[chip] needs this key", _fix(key)))
            continue
        if key == "nvlink" and table[key] == 0 and not isinstance(table[key], bool):
            continue
        try:
            values[key] = _value(key, table[key])
        except JaxparError as error:
            problems += [Problem(f"{problem.got} in {path}", problem.rule, problem.fix) for problem in error.problems]
    if "nvlink" in table and "nvlink" not in values and not problems:
        if "pcie" not in values:
            rule = "chips of a machine without NVLink communicate over PCIe"
            raise refuse(f"chip.nvlink = 0 without chip.pcie in {path}", rule=rule, fix=_fix("pcie"))
        values["nvlink"] = values["pcie"]
    if problems:
        raise JaxparError(*problems)
    return Chip(key=path.stem.lower(), kind_pattern="", **values)


def read_chip_tables(path: Path) -> dict[str, Any]:
    """Returns the tables of a chip's file: `chip`, and any of `MEASURED`.

    Raises:
      JaxparError: If the file cannot be read, is not TOML, or has other tables.
    """
    example = "[chip] with " + ", ".join(KEYS)
    rule, fix = "a chip is a TOML file", f"a file with {example}"
    try:
        parsed = files.parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(f"the chip of {path}: {error.strerror}", rule=rule, fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise refuse(
            f"{path} is no TOML: {error}", rule="a chip is a TOML file", fix=f"a file with {example}"
        ) from error
    unknown = [key for key in parsed if key != "chip" and key not in MEASURED]
    if unknown or not isinstance(parsed.get("chip"), dict):
        got = f"{unknown[0]} outside of [chip] in {path}" if unknown else f"no table [chip] in {path}"
        measured = ", ".join(f"[{name}]" for name in MEASURED)
        raise refuse(got, rule=f"a chip's file has a table [chip], and {measured} once measured", fix=example)
    return parsed


def _value(key: str, value: Any) -> Any:
    if key in _RATES:
        low, high, unit, _ = _RATES[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or not math.isfinite(value):
            raise refuse(f"chip.{key} = {value!r:.60}", rule=f"{unit}, {low:g} to {high:g}", fix=_fix(key))
        return float(value)
    if key in _WORDS:
        if not isinstance(value, str) or not value.strip():
            raise refuse(f"chip.{key} = {value!r:.60}", rule="words", fix=_fix(key))
        return value.strip()
    if key == "domain":
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65_536:
            raise refuse(f"chip.domain = {value!r:.60}", rule="chips of a machine, 1 to 65,536", fix=_fix(key))
        return value
    size = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(size, bool) or not isinstance(size, int | float) or not 1e6 <= size <= 1e15:
        raise refuse(f"chip.memory = {value!r:.60}", rule="bytes, 1e6 to 1e15, or a size", fix=_fix(key))
    return int(size)


def _fix(key: str) -> str:
    words = {"name": '"Acme One"', "source": '"measured on acme-3"', "memory": '"64 GiB"', "domain": "8"}
    return f"{key} = {words[key] if key in words else _RATES[key][3]}"
