"""What a line of a table of runs says, checked cell by cell and against itself."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpar.errors import Problem, suggest
from jaxpar.plan.candidate import RECOMPUTES
from jaxpar.plan.machine.software import SoftwareModel

from ..published.stacks import PRACTICES, SUFFIXES, SYSTEMS

CLOSE = 0.05  # by how much what was published may differ from the seconds, for it is rounded
WORDS = ("system", "model", "gpu", "source", "group")
NEEDED = ("layers", "hidden", "heads", "vocab", "seq", "gpus", "microbatch", "microbatches")
USUAL = {
    **dict.fromkeys(("kv_heads", "ffn", "gated", "tied", "zero", "sequence"), 0),
    **dict.fromkeys(("data", "fsdp", "tensor", "context", "pipe", "chunks"), 1),
}
OPTIONAL = ("id", "published", "practice", "schedule", "remat", "nic_GBps", "mem")
AXES = ("data", "fsdp", "tensor", "context", "pipe")


def numbers(row: Mapping[str, str]) -> tuple[dict[str, int], list[Problem]]:
    """Returns the whole numbers of a line, and what is wrong with it word by word."""
    problems = [Problem(f"no {key}", f"a run has a {key}", f"fill in {key}") for key in WORDS if not row[key].strip()]
    number: dict[str, int] = {}
    for key in (*NEEDED, *USUAL):
        text = (row.get(key) or "").strip()
        if text.isdecimal() and (int(text) > 0 or key in USUAL):
            number[key] = int(text)
        elif not text and key in USUAL:
            number[key] = USUAL[key]
        else:
            problems.append(Problem(f"{key} {text!r:.40}", f"{key} is a whole number", f"{key} 1"))
    for key, most in (("gated", 1), ("tied", 1), ("sequence", 1), ("zero", 3)):
        if number.get(key, 0) > most:
            problems.append(Problem(f"{key} {number[key]}", f"{key} is 0 to {most}", f"{key} {most}"))
    remat = row.get("remat") or "none"
    if remat not in RECOMPUTES:
        problems.append(Problem(f"remat {remat!r:.40}", f"one of {', '.join(RECOMPUTES)}", suggest(remat, RECOMPUTES)))
    return number, problems


def real(row: Mapping[str, str], key: str, problems: list[Problem], *, empty: float | None = None) -> float:
    """Returns the number above 0 of a cell; adds what is wrong to the problems, and returns `empty` where it is."""
    text = (row.get(key) or "").strip()
    if not text and empty is not None:
        return empty
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        problems.append(Problem(f"{key} {text!r:.40}", f"{key} is a number above 0", f"{key} 1.5"))
    return value


def software(row: Mapping[str, str], problems: list[Problem]) -> tuple[str, SoftwareModel] | None:
    """Returns the practice of a line by its name: that of its system, where the system is known, or the line's own."""
    practice, _, suffix = (row.get("practice") or "").partition("-")
    known = SYSTEMS[row["system"]](row) if row["system"] in SYSTEMS else practice
    if known not in PRACTICES:
        got = f"system {row['system']!r:.40} with practice {practice!r:.40}"
        rule = f"software that is described: a system {', '.join(SYSTEMS)}, or a practice {', '.join(PRACTICES)}"
        problems.append(Problem(got, rule, suggest(practice, PRACTICES)))
        return None
    if suffix and suffix not in SUFFIXES:
        problems.append(Problem(f"practice {practice}-{suffix}", f"-{', -'.join(SUFFIXES)}", suggest(suffix, SUFFIXES)))
        return None
    more: Mapping[str, Any] = SUFFIXES[suffix] if suffix else {}
    return known, replace(PRACTICES[known], **more)


def contradictions(row: Mapping[str, str], number: Mapping[str, int], seconds: float) -> list[Problem]:
    """Returns what a line says twice, and differently."""
    found, sizes = [], {key: number[key] for key in AXES}
    if math.prod(sizes.values()) != number["gpus"]:
        made = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "one device"
        rule = "the sizes of all axes multiply to the number of GPUs"
        return [Problem(f"{made} on {number['gpus']} GPUs", rule, f"gpus {math.prod(sizes.values())}")]
    for key, whole, part in (
        ("heads", number["heads"], number["tensor"]),
        ("tokens of a row", number["seq"], number["context"]),
    ):
        if whole % part:
            found.append(
                Problem(f"{whole} {key} over {part} devices", "an axis divides what it splits", "another size")
            )
    if number["pipe"] * number["chunks"] > number["layers"]:
        got = f"{number['layers']} layers on {number['pipe']} stages of {number['chunks']} chunks"
        found.append(Problem(got, "each chunk has a layer", "fewer stages"))
    rows = number["microbatch"] * number["microbatches"] * number["data"] * number["fsdp"]
    tokens = rows * number["seq"] / number["gpus"] / seconds
    for pattern, mine in ((r"([\d.]+) tok/s/GPU", tokens), (r"([\d.]+) s/step", seconds)):
        said = re.match(pattern, (row.get("published") or "").strip())
        if said and abs(float(said[1]) / mine - 1) > CLOSE:
            rule = "microbatch, microbatches, replicas, seq and seconds give what was published"
            found.append(
                Problem(f"{row['published']} published, {mine:.5g} by the line's own numbers", rule, "check it")
            )
    return found
