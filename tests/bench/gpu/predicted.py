"""The predictions, as a file that is committed before anything is measured.

    {"sources": hash, "versions": ..., "chips": {"h100": {"350m": {"step": {"peak_bytes": ..., ...}}}}}

They are of one hash of jaxpar's sources, and of one version of the compiler: what other code predicts is refused.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse
from jaxpar.files import write_json

from ..gpu.identity import Identity

NAME = "predicted.json"
COMPILERS = ("jax", "jaxlib")  # another version makes another program

# who predicts, and what with its unit, to number: `planner_seconds` is held to the `seconds` that are measured
Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class Predicted:
    """Predictions of one chip.

    Attributes:
      numbers: Stage to measurement to its numbers.
      file: Hash of the file they are from: a run says it, so that a file that was changed later is known.
    """

    numbers: Mapping[str, Mapping[str, Numbers]]
    file: str


def write(
    folder: Path, chip: str, numbers: Mapping[str, Mapping[str, Numbers]], code: Identity, *, rehearsal: bool
) -> Path:
    """Writes predictions beside those of other stages and chips by the same code, and returns the file."""
    path = folder / NAME
    said = {"sources": code.sources, "versions": dict(code.versions), "rehearsal": rehearsal}
    before = _load(path) if path.exists() else {}
    same = all(before.get(key) == value for key, value in said.items())
    chips = before["chips"] if same else {}
    write_json(path, said | {"chips": chips | {chip: chips.get(chip, {}) | dict(numbers)}})
    return path


def find(folder: Path, chip: str, identity: Identity, *, stages: Iterable[str] = ()) -> Predicted:
    """Returns the predictions for a chip, of a folder, or else those that jaxpar was committed with.

    Args:
      folder: Of the record.
      chip: Its key.
      identity: Of what is to be measured.
      stages: Names of those that must be predicted.

    Raises:
      JaxparError: If there are none, or they are of other code, another compiler, or other sizes.
    """
    path = folder / NAME
    if not path.exists():
        path = _committed()
    again = f"python -m tests.bench.gpu --plan{' --rehearse' * identity.rehearsal} --out {folder}"
    rule = "what is measured was predicted before, by the same code with the same compiler for the same chip and sizes"
    if not path.exists():
        raise refuse(f"no {folder / NAME}", rule=rule, fix=again)
    said = _load(path)
    wanted = {"sources": identity.sources, "rehearsal": identity.rehearsal}
    wanted |= {name: identity.versions[name] for name in COMPILERS}
    got = said | said.get("versions", {})
    foreign = [f"{key} {got.get(key)}, here {value}" for key, value in wanted.items() if got.get(key) != value]
    if chip not in said.get("chips", {}):
        foreign.append(f"chips {', '.join(said.get('chips', {})) or 'none'}, here {chip}")
    elif missing := [name for name in stages if name not in said["chips"][chip]]:
        foreign.append(f"stages without {', '.join(missing)}")
    if foreign:
        raise refuse(f"{path} of {'; '.join(foreign)}", rule=rule, fix=f"{again}, and commit it")
    return Predicted(said["chips"][chip], hashlib.sha256(path.read_bytes()).hexdigest()[:16])


def all_of(folder: Path) -> dict[str, Mapping[str, Mapping[str, Numbers]]]:
    """Returns the predictions of a folder and those that jaxpar was committed with, by the hash of their sources.

    A folder's own come first, rehearsed ones not at all; a key is the hash, a space, and the chip.
    """
    found: dict[str, Mapping[str, Mapping[str, Numbers]]] = {}
    for path in (_committed(), folder / NAME):
        said = _load(path) if path.exists() else {}
        if not said.get("rehearsal"):
            found |= {f"{said['sources']} {chip}": numbers for chip, numbers in said.get("chips", {}).items()}
    return found


def _committed() -> Path:
    return Path(__file__).parent.parent / "records" / NAME


def _load(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise refuse(f"{path}, which is no JSON object", rule=f"{NAME} is what --plan writes", fix="--plan again")
    return said
