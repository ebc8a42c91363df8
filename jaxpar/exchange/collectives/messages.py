"""Messages between devices: who sends which part of an array to whom, round by round."""

import math
from dataclasses import dataclass
from itertools import pairwise

Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """Elements of one device's array that go to another's.

    Attributes:
      source: The device that sends.
      target: The device that receives.
      part: First element, and the one past the last.
      add: Whether they are added to what is there.
      into: First element at the target; the same as at the source unless said.
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


def padded(elements: int, group: int) -> int:
    """Returns the least number of elements, not less than these, that every algorithm cuts into equal pieces."""
    ways = math.lcm(group, 1 << (group.bit_length() - 1))
    return -(-elements // ways) * ways


def cut(part: Part, pieces: int) -> list[Part]:
    """Returns a part in so many pieces, as equal as they can be."""
    start, stop = part
    at = [start + (stop - start) * i // pieces for i in range(pieces + 1)]
    return list(pairwise(at))
