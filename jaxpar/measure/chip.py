"""The chip file that a measurement is written to; it is checked before anything is measured."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.mesh.chip_file import load_chip
from jaxpar.mesh.chips import Chip, find_chip
from jaxpar.plan.machine.hardware_file import write_table


@dataclass(frozen=True, slots=True)
class Destination:
    """The file that a measurement is written to.

    Attributes:
      path: The chip's file; None where nothing is written.
      chip: The chip of that file, or of the devices; None where neither is known, and nothing is written.
      kind: JAX's name of the devices, `device_kind`.
    """

    path: Path | None
    chip: Chip | None
    kind: str

    @classmethod
    def for_devices(cls, write: str, devices: Sequence[Any]) -> "Destination":
        """Returns the destination for these devices.

        Raises:
          JaxparError: If the file describes another chip or its path cannot be written, or if there is no file and
            jaxpar's table has no such chip.
        """
        kind = devices[0].device_kind
        chip = find_chip(kind)
        if not write:
            return cls(None, chip, kind)
        path = Path(write)
        if path.exists():
            own = load_chip(path)
            named = find_chip(own.name)
            if chip and named and named is not chip:
                raise refuse(
                    f"{path} of an {own.name}, on {kind}",
                    rule="a file describes one chip, the one that is measured",
                    fix="--write mine.toml",
                )
            return cls(path, own, kind)
        if path.suffix != ".toml" or not path.absolute().parent.is_dir():
            raise refuse(f"--write {write}", rule="a .toml file, in a folder that exists", fix="--write mine.toml")
        found = cls(path, chip, kind)
        found.known_chip()
        return found

    def known_chip(self) -> Chip:
        """Returns the chip.

        Raises:
          JaxparError: If it is not known.
        """
        if self.chip is None:
            raise refuse(
                f"{self.kind}, which is not in jaxpar's table of chips",
                rule="a chip that is not in jaxpar's table needs a file with its peak FLOP/s and its memory",
                fix="--write mine.toml, with the table [chip] of jaxpar/mesh/chip_file.py in it",
            )
        return self.chip

    def write(self, name: str, table: Mapping[str, Any]) -> None:
        """Writes a table into the file, if there is a path; of several processes, only the first writes."""
        if self.path is not None and jax.process_index() == 0:
            write_table(self.path, name, table, chip=self.known_chip())
            print(f"[{name}]: {self.path}")


def today() -> str:
    """Returns today's date in the format of `source`."""
    return datetime.date.today().isoformat()
