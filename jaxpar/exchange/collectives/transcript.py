"""A collective as text: its messages round by round, and the devices' arrays before and after a run."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.errors import refuse, suggest
from jaxpar.exchange.collectives.programs import OWN, PROGRAMS, ROWS, TABLES
from jaxpar.exchange.collectives.rooted import Round, padded_size

_WIDE = 12  # maximum elements shown per device


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A run of a collective: its messages, and the arrays before and after.

    Attributes:
      name: One of `PROGRAMS`.
      rounds: The messages of each round.
      before: The devices' arrays at the start. Shape [devices, ...].
      after: Their arrays after the program has run. Shape [devices, ...].
    """

    name: str
    rounds: list[Round]
    before: np.ndarray
    after: np.ndarray

    def __str__(self) -> str:
        devices = len(self.before)
        lines = [f"{self.name} between {devices} devices"]
        load = np.zeros(devices, int)
        for number, messages in enumerate(self.rounds, 1):
            texts = [
                f"{m.source} -> {m.target} [{m.part[0]}:{m.part[1]}]" + " added" * m.add for m in messages if m.size
            ]
            lines.append(f"round {number}  {', '.join(texts)}")
            for message in messages:
                load[message.source] += message.size
        count = sum(1 for messages in self.rounds for message in messages if message.size)
        lines.append(
            f"{count} messages in {len(self.rounds)} rounds; {load.sum()} elements in all, {load.max()} by the device "
            "that sends most"
        )
        for device in range(devices):
            lines.append(f"device {device}  {_numbers(self.before[device])}  ->  {_numbers(self.after[device])}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the run as JSON values."""
        rounds = [[asdict(message) for message in messages] for messages in self.rounds]
        return {"name": self.name, "rounds": rounds, "before": self.before.tolist(), "after": self.after.tolist()}


def check(name: str) -> None:
    """Refuses an unknown collective.

    Raises:
      JaxparError: If it is unknown.
    """
    if name not in PROGRAMS:
        raise refuse(f"collective {name!r:.60}", rule=f"one of {', '.join(PROGRAMS)}", fix=suggest(name, PROGRAMS))


def show(name: str, devices: list[Any]) -> Transcript:
    """Runs a collective on these devices; the array of device r begins as 10r, 10r + 1, ...

    Args:
      name: One of `PROGRAMS`.
      devices: Real or simulated devices.

    Raises:
      JaxparError: If the collective is unknown.
    """
    check(name)
    count = len(devices)
    elements = padded_size(count, count) if name == "halving" else count
    shape = (1,) if name in OWN else (count, 1) if name in ROWS else (elements,)
    inputs = 10 * np.arange(count).reshape(-1, *(1,) * len(shape)) + np.arange(np.prod(shape)).reshape(shape)
    spec = PartitionSpec("data")
    program = jax.shard_map(
        lambda x: PROGRAMS[name](x[0], "data")[None],
        mesh=Mesh(np.array(devices), ("data",)), in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    outputs = np.asarray(jax.jit(program)(inputs.astype(np.int32)))
    return Transcript(name=name, rounds=TABLES[name](range(count), (0, elements)), before=inputs, after=outputs)


def _numbers(values: np.ndarray) -> str:
    texts = [str(value) for value in values.reshape(-1)]
    return " ".join(texts[:_WIDE]) + " .." * (len(texts) > _WIDE)
