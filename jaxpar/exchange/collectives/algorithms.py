"""Collectives as tables of messages: with a root, by a binomial tree, and without one, above all all-reduces.

    broadcast, 6 devices    0 ─► 4 | 0 ─► 2 | 0 ─► 1, 2 ─► 3, 4 ─► 5
    reduce                  the same messages reversed, last first, and added

The first device is the root, which sends to all or receives from all. Gather and scatter send a device's whole subtree
as one message. `data_parallel` has no tree: its root serves one device after the other.

Each function takes the participating devices, in order, and the part of the array, and returns a table. `deliver` in
`executor.py` applies a table to arrays on the host, `run_rounds` runs it on devices, and `seconds` computes its time.

To add an all-reduce: its function here and a row of `ALL_REDUCE`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxpar.errors import refuse, suggest
from jaxpar.mesh.chips import Link
from jaxpar.mesh.collective import Traffic

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


def all_reduce_rounds(name: str, group: int, elements: int) -> list[Round]:
    """Returns the rounds of an all-reduce between `group` devices.

    Args:
      name: One of `ALL_REDUCE`.
      group: Number of devices, numbered from 0.
      elements: Number of elements of the array; see `padded_size` for a number that divides into equal pieces.

    Raises:
      JaxparError: If there is no such algorithm.
    """
    check(name)
    return ALL_REDUCE[name](range(group), (0, elements))


def check(name: str) -> None:
    """Refuses an unknown algorithm.

    Raises:
      JaxparError: If it is unknown.
    """
    if name not in ALL_REDUCE:
        raise refuse(
            f"algorithm={name!r:.60}",
            rule=f"an all-reduce is one of {', '.join(ALL_REDUCE)}",
            fix=suggest(str(name), ALL_REDUCE),
        )


def reduce_scatter(ranks: Sequence[int], part: Part) -> list[Round]:
    """Reduce-scatter by a ring: the i-th device ends with the sum of the i-th piece."""
    count, pieces = len(ranks), split_part(part, len(ranks))
    return [
        [Message(ranks[i], ranks[(i + 1) % count], pieces[(i - step - 1) % count], add=True) for i in range(count)]
        for step in range(count - 1)
    ]


def all_gather(ranks: Sequence[int], part: Part) -> list[Round]:
    """All-gather by a ring: the i-th device begins with the i-th piece."""
    count, pieces = len(ranks), split_part(part, len(ranks))
    return [
        [Message(ranks[i], ranks[(i + 1) % count], pieces[(i - step) % count]) for i in range(count)]
        for step in range(count - 1)
    ]


def ring(ranks: Sequence[int], part: Part) -> list[Round]:
    """All-reduce by a ring: reduce-scatter, then all-gather."""
    return reduce_scatter(ranks, part) + all_gather(ranks, part)


def tree(ranks: Sequence[int], part: Part) -> list[Round]:
    """All-reduce by a binomial tree: reduces to the first device, then broadcasts."""
    return reduce(ranks, part) + broadcast(ranks, part)


def butterfly(ranks: Sequence[int], part: Part) -> list[Round]:
    """All-reduce by a butterfly: partners at distances 1, 2, 4, ... exchange their full partial sums."""

    def core(ranks: Sequence[int]) -> list[Round]:
        spans = [1 << level for level in range(len(ranks).bit_length() - 1)]
        return [[Message(ranks[i], ranks[i ^ span], part, add=True) for i in range(len(ranks))] for span in spans]

    return _fold_extra_devices(ranks, part, core)


def halving(ranks: Sequence[int], part: Part) -> list[Round]:
    """Rabenseifner's all-reduce: a reduce-scatter by recursive halving, then an all-gather by recursive doubling."""

    def core(ranks: Sequence[int]) -> list[Round]:
        local_pieces, reduce_rounds, gather_rounds = [part] * len(ranks), [], []
        spans = [1 << level for level in range(len(ranks).bit_length() - 1)]
        for span in reversed(spans):
            # both partners halve the same piece; a device keeps the second half if its rank has the bit `span`
            halves = [split_part(piece, 2) for piece in local_pieces]
            outgoing = [halves[i][0 if i & span else 1] for i in range(len(ranks))]
            local_pieces = [halves[i][1 if i & span else 0] for i in range(len(ranks))]
            reduce_rounds.append([Message(ranks[i], ranks[i ^ span], outgoing[i], add=True) for i in range(len(ranks))])
            gather_rounds.append([Message(ranks[i], ranks[i ^ span], local_pieces[i]) for i in range(len(ranks))])
        return reduce_rounds + gather_rounds[::-1]  # gathers in reverse order, from the smallest pieces on

    return _fold_extra_devices(ranks, part, core)


def two_levels(ranks: Sequence[int], part: Part, *, inside: int | None = None) -> list[Round]:
    """All-reduce in two levels: reduce-scatter inside each node, all-reduce of each piece between nodes, all-gather.

    All devices of a node send to other nodes at once, each a different piece.

    Args:
      ranks: Devices, ordered by node.
      part: The part of the array.
      inside: Number of devices per node; divides the number of devices. By default the smallest divisor that is at
        least the square root of the number of devices.
    """
    count = len(ranks)
    inside = inside or next(size for size in range(math.isqrt(count - 1) + 1, count + 1) if count % size == 0)
    nodes = [ranks[start : start + inside] for start in range(0, count, inside)]
    cross_node = [ring([node[place] for node in nodes], piece) for place, piece in enumerate(split_part(part, inside))]
    return [
        *_merge_tables(reduce_scatter(node, part) for node in nodes),
        *_merge_tables(cross_node),
        *_merge_tables(all_gather(node, part) for node in nodes),
    ]


def all_to_all(ranks: Sequence[int], part: Part) -> list[Round]:
    """The i-th device sends its j-th piece to the j-th device, which stores it after the part, in order of senders."""
    count, pieces = len(ranks), split_part(part, len(ranks))
    offset = part[1] - part[0]
    return [
        [
            Message(ranks[i], ranks[(i + step) % count], pieces[(i + step) % count], into=pieces[i][0] + offset)
            for i in range(count)
        ]
        for step in range(1, count)
    ]


ALL_REDUCE: dict[str, Callable[[Sequence[int], Part], list[Round]]] = {
    "ring": ring,
    "halving": halving,
    "butterfly": butterfly,
    "tree": tree,
    "two_levels": two_levels,
}


def _merge_tables(tables: Iterable[list[Round]]) -> list[Round]:
    """Merges tables for disjoint sets of devices, round by round."""
    return [[message for messages in rounds for message in messages] for rounds in zip(*tables, strict=True)]


def _fold_extra_devices(ranks: Sequence[int], part: Part, core) -> list[Round]:
    """Extends an all-reduce to any number of devices: an extra device first sends to a partner, which sends the sum
    back at the end.
    """
    count = 1 << (len(ranks).bit_length() - 1)
    pairs = [(ranks[i], ranks[i - count]) for i in range(count, len(ranks))]
    fold = [[Message(extra, partner, part, add=True) for extra, partner in pairs]] * bool(pairs)
    unfold = [[Message(partner, extra, part) for extra, partner in pairs]] * bool(pairs)
    return [*fold, *core(ranks[:count]), *unfold]


# Seconds of a table of messages, in alpha-beta-gamma form, from its rounds and their bytes.
#
# A round takes as long as its longest message: the latency, its bytes over the wire, and the time to add them, if they
# are added. For equal devices these are the closed forms of Thakur, Rabenseifner, Gropp (2005), sections 3 and 4.


def seconds(rounds: Iterable[Round], link: Link, *, item: float = 1.0) -> float:
    """Computes the seconds of a table on one kind of link.

    Args:
      rounds: The messages of each round.
      link: The link between any two devices.
      item: Bytes per element.
    """

    def one(messages: Round) -> float:
        return max((link.time(item * m.size) + m.add * link.combine * item * m.size for m in messages), default=0.0)

    return sum(one(messages) for messages in rounds)


def cheapest(link: Link, size: float, group: int) -> tuple[str, float]:
    """Finds the fastest all-reduce of `size` bytes; returns its name and its seconds.

    >>> cheapest(Link(latency=5e-6, bandwidth=12e9), 80_000, 64)[0]
    'butterfly'
    """
    elements = padded_size(1, group)  # as many pieces as any algorithm needs
    priced = {
        name: seconds(all_reduce_rounds(name, group, elements), link, item=size / elements) for name in ALL_REDUCE
    }
    return min(priced.items(), key=lambda item: item[1])


def traffic_seconds(sent: Iterable[Traffic], link: Link) -> float:
    """Computes the seconds of a sync round: its permutes in sequence, plus all else as one `cheapest` all-reduce."""
    collectives = [item.collective for item in sent]
    permuted = sum((c.times or 1) * link.time(c.payload) for c in collectives if c.kind == "collective-permute")
    reduced = sum(c.step_payload for c in collectives if c.kind != "collective-permute")
    return permuted + (cheapest(link, reduced, collectives[0].group)[1] if reduced else 0.0)
