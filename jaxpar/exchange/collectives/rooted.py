"""Collectives with a root, the first device, which sends to all or receives from all by a binomial tree.

    broadcast, 6 devices    0 ─► 4 | 0 ─► 2 | 0 ─► 1, 2 ─► 3, 4 ─► 5
    reduce                  the same messages reversed, last first, and added

Gather and scatter send a device's whole subtree as one message. `data_parallel` has no tree: its root serves one
device after the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Messages between devices: part of an array, source and target, in rounds.

Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """Elements of one device's array that are sent to another device.

    Attributes:
      source: The device that sends.
      target: The device that receives.
      part: Range of the elements: the first, and one past the last.
      add: Whether the target adds them to its elements instead of replacing these.
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
    """Rounds a number of elements up to one that every algorithm divides into equal pieces."""
    divisor = math.lcm(group, 1 << (group.bit_length() - 1))
    return -(-elements // divisor) * divisor


def split_part(part: Part, pieces: int) -> list[Part]:
    """Divides a part into a number of pieces, as equal as possible."""
    start, stop = part
    bounds = [start + (stop - start) * i // pieces for i in range(pieces + 1)]
    return list(pairwise(bounds))


def send(ranks: Sequence[int], part: Part) -> list[Round]:
    """The first device sends the part to the last."""
    return [[Message(ranks[0], ranks[-1], part)]] if len(ranks) > 1 else []


def broadcast(ranks: Sequence[int], part: Part) -> list[Round]:
    """All devices get the first device's part."""
    return [[Message(ranks[a], ranks[b], part) for a, b, _ in level] for level in reversed(_levels(len(ranks)))]


def reduce(ranks: Sequence[int], part: Part) -> list[Round]:
    """The first device gets the sum over all devices; the other devices end with partial sums."""
    return [[Message(ranks[b], ranks[a], part, add=True) for a, b, _ in level] for level in _levels(len(ranks))]


def gather(ranks: Sequence[int], part: Part) -> list[Round]:
    """The first device gets the i-th piece from the i-th device."""
    pieces = split_part(part, len(ranks))
    return [
        [Message(ranks[b], ranks[a], (pieces[b][0], pieces[stop][1])) for a, b, stop in level]
        for level in _levels(len(ranks))
    ]


def scatter(ranks: Sequence[int], part: Part) -> list[Round]:
    """The i-th device gets the i-th piece of the first device's part."""
    pieces = split_part(part, len(ranks))
    return [
        [Message(ranks[a], ranks[b], (pieces[b][0], pieces[stop][1])) for a, b, stop in level]
        for level in reversed(_levels(len(ranks)))
    ]


def data_parallel(ranks: Sequence[int], parameters: Part, logits: Part) -> list[Round]:
    """A step of PyTorch's `nn.DataParallel`, whose messages all pass through the first device, one at a time.

    The root sends its parameters to all devices, receives their logits, sends back the gradients of the logits, and
    receives the gradients of the parameters, which it adds to the elements past the logits. With R devices, w
    parameters and l logits per device, it sends and receives (R - 1) (w + l) elements each; in an all-reduce by ring
    (DDP) every device sends 2 (R - 1) / R w.

    Args:
      ranks: Devices, the root first.
      parameters: Range of the parameters in the array.
      logits: Range of the logits of all devices, one piece per device.
    """
    root, workers, pieces = ranks[0], ranks[1:], split_part(logits, len(ranks))[1:]
    gradients = (logits[1], logits[1] + parameters[1] - parameters[0])
    return [
        *([Message(root, rank, parameters)] for rank in workers),
        *([Message(rank, root, piece)] for rank, piece in zip(workers, pieces, strict=True)),
        *([Message(root, rank, piece)] for rank, piece in zip(workers, pieces, strict=True)),
        *([Message(rank, root, gradients, add=True)] for rank in workers),
    ]


def _levels(count: int) -> list[list[tuple[int, int, int]]]:
    """Returns the edges of a binomial tree, leaves first: (parent, child, last device in the child's subtree)."""
    # each level halves the number of devices that hold a part of the sum; unless their number is a power of two, the
    # last pair of a level may lack its second device, and is left out
    spans = [1 << level for level in range((count - 1).bit_length())]
    return [[(i, i + span, min(i + 2 * span, count) - 1) for i in range(0, count - span, 2 * span)] for span in spans]
