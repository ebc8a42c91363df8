"""Collectives as messages: who sends which part of the array to whom, round by round.

Each is a function of the devices that take part, in order, and of the part of the array; so
that a hierarchical one is made of these over some of the devices and some of the array.
"""

from collections.abc import Sequence
from itertools import pairwise, zip_longest

from jaxpar.exchange.replay import Message, Round

Part = tuple[int, int]


def cut(part: Part, pieces: int) -> list[Part]:
    """Returns a part in so many pieces, as equal as they can be."""
    start, stop = part
    at = [start + (stop - start) * i // pieces for i in range(pieces + 1)]
    return list(pairwise(at))


def together(*exchanges: Sequence[Round]) -> list[Round]:
    """Returns exchanges of different devices, or over different links, as one."""
    return [
        [message for messages in rounds for message in messages] for rounds in zip_longest(*exchanges, fillvalue=())
    ]


def reduce_scatter(ranks: Sequence[int], part: Part) -> list[Round]:
    """A ring's: the i-th device ends with the sum of the i-th piece."""
    count, pieces = len(ranks), cut(part, len(ranks))
    return [
        [Message(ranks[i], ranks[(i + 1) % count], pieces[(i - step - 1) % count], add=True) for i in range(count)]
        for step in range(count - 1)
    ]


def all_gather(ranks: Sequence[int], part: Part) -> list[Round]:
    """A ring's: the i-th device begins with the i-th piece."""
    count, pieces = len(ranks), cut(part, len(ranks))
    return [
        [Message(ranks[i], ranks[(i + 1) % count], pieces[(i - step) % count]) for i in range(count)]
        for step in range(count - 1)
    ]


def ring(ranks: Sequence[int], part: Part) -> list[Round]:
    """An all-reduce: reduce-scatter, then all-gather."""
    return reduce_scatter(ranks, part) + all_gather(ranks, part)


def tree(ranks: Sequence[int], part: Part) -> list[Round]:
    """An all-reduce: by a binomial tree to the first device, and back."""
    spans = [1 << level for level in range((len(ranks) - 1).bit_length())]
    pairs = [[(i, i + span) for i in range(0, len(ranks) - span, 2 * span)] for span in spans]
    up = [[Message(ranks[b], ranks[a], part, add=True) for a, b in level] for level in pairs]
    return up + [[Message(ranks[a], ranks[b], part) for a, b in level] for level in reversed(pairs)]


def butterfly(ranks: Sequence[int], part: Part) -> list[Round]:
    """An all-reduce: partners at distances 1, 2, 4, ... exchange all they have."""

    def core(ranks: Sequence[int]) -> list[Round]:
        spans = [1 << level for level in range(len(ranks).bit_length() - 1)]
        return [[Message(ranks[i], ranks[i ^ span], part, add=True) for i in range(len(ranks))] for span in spans]

    return _folded(ranks, part, core)


def halving(ranks: Sequence[int], part: Part) -> list[Round]:
    """Rabenseifner's all-reduce: halves are exchanged with ever nearer partners, then gathered back."""

    def core(ranks: Sequence[int]) -> list[Round]:
        held, down, up = [part] * len(ranks), [], []
        spans = [1 << level for level in range(len(ranks).bit_length() - 1)]
        for span in reversed(spans):
            halves = [cut(piece, 2) for piece in held]
            given = [halves[i][0 if i & span else 1] for i in range(len(ranks))]
            held = [halves[i][1 if i & span else 0] for i in range(len(ranks))]
            down.append([Message(ranks[i], ranks[i ^ span], given[i], add=True) for i in range(len(ranks))])
            up.append([Message(ranks[i], ranks[i ^ span], held[i]) for i in range(len(ranks))])
        return down + up[::-1]

    return _folded(ranks, part, core)


def parameter_server(ranks: Sequence[int], servers: Sequence[int], part: Part) -> list[Round]:
    """A push to servers that each own a piece, and a pull; in every round each server takes one message."""
    count, pieces = len(servers), cut(part, len(servers))
    turns = [(i, q) for i in range(count) for q in range(len(ranks) // count)]
    pairs = [[(((server - i) % count) + q * count, server) for server in range(count)] for i, q in turns]
    push = [
        [Message(ranks[r], servers[s], pieces[s], add=turn > 0, posted=True) for r, s in pairs[turn]]
        for turn in range(len(turns))
    ]
    return push + [[Message(servers[s], ranks[r], pieces[s], posted=True) for r, s in turn] for turn in pairs]


def all_to_all(ranks: Sequence[int], part: Part) -> list[Round]:
    """The i-th device sends its j-th piece to the j-th; what comes lies past the part, in the order of the senders."""
    count, pieces = len(ranks), cut(part, len(ranks))
    past = part[1] - part[0]
    return [
        [
            Message(ranks[i], ranks[(i + step) % count], pieces[(i + step) % count], into=pieces[i][0] + past)
            for i in range(count)
        ]
        for step in range(1, count)
    ]


def broadcast(ranks: Sequence[int], part: Part, chunks: int) -> list[Round]:
    """From the first device along the chain, a chunk after another."""
    pieces = cut(part, chunks)
    return [
        [
            Message(ranks[i], ranks[i + 1], pieces[turn - i])
            for i in range(len(ranks) - 1)
            if 0 <= turn - i < chunks
        ]
        for turn in range(chunks + len(ranks) - 2)
    ]  # fmt: skip


def _folded(ranks: Sequence[int], part: Part, core) -> list[Round]:
    """Returns an exchange of a power of two for any number: the others give to one of them first, and get it last."""
    count = 1 << (len(ranks).bit_length() - 1)
    pairs = [(ranks[i], ranks[i - count]) for i in range(count, len(ranks))]
    first = [[Message(extra, kept, part, add=True) for extra, kept in pairs]] * bool(pairs)
    last = [[Message(kept, extra, part) for extra, kept in pairs]] * bool(pairs)
    return [*first, *core(ranks[:count]), *last]
