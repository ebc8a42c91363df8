"""The tables of the README, made of what was predicted and what was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.mesh.chips import find_chip
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.units import show_bytes, show_seconds

from ..gpu.fitted import FITTED_ON, fit, judge
from ..gpu.predicted import Numbers
from ..gpu.runner import WHOLE

Known = Mapping[str, Mapping[str, Numbers]]
NOTHING = "No run on a GPU is on record yet."


def tables(lines: Sequence[dict[str, Any]], known: Mapping[str, Known]) -> str:
    """Returns the tables of a record in Markdown, or that nothing is on record.

    Args:
      lines: Of the record. Those of a rehearsal are left out, and counted.
      known: Hash of sources and chip, as `predicted.all_of` has them, to predictions.
    """
    kept = [line for line in lines if not line.get("rehearsal") and line.get("what") != WHOLE]
    if not kept:
        rehearsed = sum(bool(line.get("rehearsal")) for line in lines)
        return NOTHING + f" {rehearsed} lines of a rehearsal are none." * bool(rehearsed)
    each = dict.fromkeys(_whose(line) for line in kept)
    return "\n\n".join(_device(of, [line for line in kept if _whose(line) == of], known) for of in each)


def rows(lines: Sequence[dict[str, Any]], known: Known) -> list[tuple[str, str, str, Any, dict[str, float]]]:
    """Returns (stage, what, quantity, measured, who predicts to the number) of all that was predicted and measured."""
    found = []
    for line in lines:
        numbers = known.get(line["stage"], {}).get(line["what"], {})
        quantities = [key for key in line if any(name.endswith(f"_{key}") for name in numbers)]
        for key in quantities:
            if isinstance(line[key], int | float):
                said = {name.removesuffix(f"_{key}"): numbers[name] for name in numbers if name.endswith(f"_{key}")}
                found.append((line["stage"], line["what"], key, line[key], said))
    return found


def _whose(line: dict[str, Any]) -> tuple[str, str, str, str]:
    return line["device"], line["driver"], line["versions"]["jax"], line["sources"]


def _device(of: tuple[str, str, str, str], lines: Sequence[dict[str, Any]], known: Mapping[str, Known]) -> str:
    device, driver, jax, sources = of
    head = f"One {device}, driver {driver}, jax {jax}, sources {sources}."
    chip = find_chip(device)
    found = rows(lines, known.get(f"{sources} {chip.key if chip else ''}", {}))
    if not found:
        return f"{head} What was predicted for these sources is not here: {len(lines)} measurements stand alone."
    shown = [
        f"| {stage} | {what} | {_number(key, value)} | {', '.join(_beside(key, value, said))} |"
        for stage, what, key, value, said in found
    ]
    title = ["| stage | what | measured | predicted, and by how much the measurement is more |", "|---|---|---|---|"]
    return "\n".join([head, "", *title, *shown, *_judged(lines, chip.key if chip else "")])


def _judged(lines: Sequence[dict[str, Any]], chip: str) -> list[str]:
    """Returns how constants that are fitted on a part of the record foretell the rest of it."""
    known = HARDWARE.get(chip)
    own = fit(lines, known) if known else None
    if own is None:
        return []
    constants = f"matmuls {own.gemm.top:.3f} of the peak x f / (f + {own.gemm.half / 1e9:.3g} GFLOP)"
    judged = [
        f"{name} {show_seconds(value)}, planner {show_seconds(number)} ({value / number - 1:+.1%})"
        for name, (value, number) in judge(lines, own).items()
    ]
    return ["", f"Fitted on gemm and {FITTED_ON}: {constants}, memory {own.streaming:.3f} of its bandwidth.",
            f"Judged: {'; '.join(judged) or 'nothing measured yet'}."]  # fmt: skip


def _beside(key: str, value: float, said: Mapping[str, float]) -> list[str]:
    return [f"{who} {_number(key, number)} ({value / number - 1:+.1%})" for who, number in said.items() if number]


def _number(key: str, value: float) -> str:
    return show_bytes(value) if key.endswith("bytes") else show_seconds(value)
