"""Messages between devices: part of an array, source and target, in rounds."""

import math
from dataclasses import dataclass
from itertools import pairwise

Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """Elements of one device's array that are sent to another's.

    Attributes:
      source: The device that sends.
      target: The device that receives.
      part: First element, and the one past the last.
      add: Whether the target adds them to its own.
      into: First element at the target; by default the same as at the source.
    """

    source: int
    target: int
    part: Part
    add: bool = False
    into: int | None = None

    @property
    def size(self) -> int:
        """Elements."""
        return self.part[1] - self.part[0]


Round = list[Message]


def padded_size(elements: int, group: int) -> int:
    """Rounds a number of elements up to one that every algorithm cuts into equal pieces."""
    divisor = math.lcm(group, 1 << (group.bit_length() - 1))
    return -(-elements // divisor) * divisor


def cut(part: Part, pieces: int) -> list[Part]:
    """Cuts a part into so many pieces, as equal as possible."""
    start, stop = part
    bounds = [start + (stop - start) * i // pieces for i in range(pieces + 1)]
    return list(pairwise(bounds))
