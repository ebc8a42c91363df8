"""The identity of a measurement: what was measured, on what, and by which code.

Code is identified by a hash of the sources of jaxpar and of the benches and not by git: a copy on another machine has
no history. Records are no sources, so that a prediction stays valid when it is committed.
"""

import hashlib
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jaxpar
from jaxpar.errors import refuse
from jaxpar.measure.record import commit, installed, versions

PACKAGES = ("jax-cuda13-pjrt", "nvidia-cudnn-cu13", "nvidia-cublas", "torch", "triton")  # what else runs on a GPU
REHEARSED = "rehearsal, no GPU"


@dataclass(frozen=True)
class Identity:
    """Whose a measurement is: two of the same identity are comparable, and one need not be taken twice.

    Attributes:
      device: The GPU's name, as its driver has it.
      driver: The driver's version.
      versions: Of Python and of the packages that compute.
      sources: Hash of jaxpar's sources.
    """

    device: str
    driver: str
    versions: Mapping[str, str]
    sources: str

    @property
    def rehearsal(self) -> bool:
        """Whether nothing was measured."""
        return self.device == REHEARSED

    def owns(self, line: Mapping[str, Any]) -> bool:
        """Returns whether a line of a record has this identity."""
        return all(line.get(key) == value for key, value in asdict(self).items())

    def to_dict(self) -> dict[str, Any]:
        """Returns the identity as a line has it; with the commit, which is "" outside of git."""
        return asdict(self) | {"commit": commit()} | ({"rehearsal": True} if self.rehearsal else {})


def identify(*, rehearsal: bool) -> Identity:
    """Returns the identity of what is measured here and now; makes no device.

    Raises:
      JaxparError: If there is no GPU, and it is no rehearsal.
    """
    device, driver = (REHEARSED, "none") if rehearsal else _driver()
    found = versions() | {name: installed(name) for name in PACKAGES}
    return Identity(device, driver, found, sources())


FOLDERS = (Path(jaxpar.__file__).parent, Path(__file__).parent.parent)


@cache
def sources(*folders: Path) -> str:
    """Returns a hash of the Python files of folders, by default jaxpar's and the benches': 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for folder in folders or FOLDERS:
        for path in sorted(set(folder.rglob("*.py")) - set(folder.glob("test_*.py"))):
            text = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


def check_unchanged(identity: Identity, *folders: Path) -> None:
    """Refuses sources that are no longer those of an identity: files that were imported since are other code.

    Raises:
      JaxparError: If a file was changed.
    """
    if (now := sources.__wrapped__(*folders)) != identity.sources:
        raise refuse(
            f"sources {identity.sources} when it began, {now} now",
            rule="what is predicted or measured is of one state of the code",
            fix="the same once more, while nobody edits jaxpar",
        )


def _driver() -> tuple[str, str]:
    """Returns the name of the first GPU and the version of its driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        lines = said.stdout.strip().splitlines() if said.returncode == 0 else []
        why = (said.stderr or said.stdout).strip().splitlines()[:1]
    except (OSError, subprocess.TimeoutExpired) as error:
        lines, why = [], [str(error)]
    if not lines:
        raise refuse(
            f"bench gpu without a GPU: {''.join(why)[:200]}",
            rule="speed is measured on a GPU, which nvidia-smi names; a rehearsal measures nothing",
            fix="--rehearse, or --plan, which need none; where a GPU is, jaxpar doctor says why it is not seen",
        )
    name, _, driver = lines[0].partition(",")
    return name.strip(), driver.strip()
