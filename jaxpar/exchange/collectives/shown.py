"""A collective in text: its messages round by round, and what devices begin and end with when it runs on them."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.errors import nearest, refuse
from jaxpar.exchange.collectives.messages import Round, padded
from jaxpar.exchange.collectives.programs import OWN, PROGRAMS, ROWS, TABLES

_WIDE = 12  # numbers of a device that are shown


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A collective between so many devices.

    Attributes:
      name: One of `PROGRAMS`.
      rounds: Its messages.
      before: What devices begin with. Shape [devices, ...].
      after: What the program leaves on them, run on as many devices. Shape [devices, ...].
    """

    name: str
    rounds: list[Round]
    before: np.ndarray
    after: np.ndarray

    def __str__(self) -> str:
        devices = len(self.before)
        lines = [f"{self.name} between {devices} devices"]
        sent = np.zeros(devices, int)
        for number, messages in enumerate(self.rounds, 1):
            each = [
                f"{m.source} -> {m.target} [{m.part[0]}:{m.part[1]}]" + " added" * m.add for m in messages if m.size
            ]
            lines.append(f"round {number}  {', '.join(each)}")
            for message in messages:
                sent[message.source] += message.size
        count = sum(1 for messages in self.rounds for message in messages if message.size)
        lines.append(
            f"{count} messages in {len(self.rounds)} rounds; {sent.sum()} elements in all, {sent.max()} by the device "
            "that sends most"
        )
        for device in range(devices):
            lines.append(f"device {device}  {_numbers(self.before[device])}  ->  {_numbers(self.after[device])}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        rounds = [[asdict(message) for message in messages] for messages in self.rounds]
        return {"name": self.name, "rounds": rounds, "before": self.before.tolist(), "after": self.after.tolist()}


def check(name: str) -> None:
    """Refuses what is no collective.

    Raises:
      JaxparError: If it is none.
    """
    if name not in PROGRAMS:
        raise refuse(f"collective {name!r:.60}", rule=f"one of {', '.join(PROGRAMS)}", fix=nearest(name, PROGRAMS))


def show(name: str, devices: list[Any]) -> Shown:
    """Returns a collective and what its program does on these devices, the r-th of which begins with 10r, 10r + 1, ...

    Args:
      name: One of `PROGRAMS`.
      devices: Real or simulated ones.

    Raises:
      JaxparError: If there is no such collective.
    """
    check(name)
    count = len(devices)
    elements = padded(count, count) if name == "halving" else count
    shape = (1,) if name in OWN else (count, 1) if name in ROWS else (elements,)
    before = 10 * np.arange(count).reshape(-1, *(1,) * len(shape)) + np.arange(np.prod(shape)).reshape(shape)
    over = PartitionSpec("data")
    program = jax.shard_map(
        lambda x: PROGRAMS[name](x[0], "data")[None],
        mesh=Mesh(np.array(devices), ("data",)), in_specs=over, out_specs=over, check_vma=False,
    )  # fmt: skip
    after = np.asarray(jax.jit(program)(before.astype(np.int32)))
    return Shown(name=name, rounds=TABLES[name](range(count), (0, elements)), before=before, after=after)


def _numbers(values: np.ndarray) -> str:
    shown = [str(value) for value in values.reshape(-1)]
    return " ".join(shown[:_WIDE]) + " .." * (len(shown) > _WIDE)
