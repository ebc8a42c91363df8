"""Closed forms of collectives in alpha-beta-gamma form, between devices that are all alike.

    all-reduce of n bytes        latencies        bytes sent one after another   bytes added
    tree                         2 ceil(lg P)     2 n ceil(lg P)                 n ceil(lg P)
    butterfly                    lg P             n lg P                         n lg P
    ring                         2 (P-1)          2 n (P-1)/P                    n (P-1)/P
    halving (Rabenseifner)       2 lg P           2 n (P-1)/P                    n (P-1)/P
    two levels, a in each of b   2 (a-1 + b-1)    2 n (P-1)/P                    n (P-1)/P
    lower bound                  ceil(lg P)       2 n (P-1)/P                    n (P-1)/P

Butterfly and halving are for powers of two; with any other P the devices past the largest power of two send all they
have to another first, and get the result last. Source: Thakur, Rabenseifner, Gropp (2005), sections 3 and 4.
"""

from jaxpar.mesh.collective import wire_bytes


def tree(link, size, group):
    return (group - 1).bit_length() * (2 * link.time(size) + link.combine * size)


def butterfly(link, size, group):
    rounds = group.bit_length() - 1
    return rounds * (link.time(size) + link.combine * size) + fold(link, size, group)


def ring(link, size, group):
    return reduce_scatter(link, size, group) + all_gather(link, size, group)


def halving(link, size, group):
    rounds = group.bit_length() - 1
    wire = wire_bytes("all-reduce", size, 1 << rounds)
    return 2 * rounds * link.latency + wire / link.bandwidth + wire / 2 * link.combine + fold(link, size, group)


def lower_bound(link, size, group):
    wire = wire_bytes("all-reduce", size, group)
    return (group - 1).bit_length() * link.latency + wire / link.bandwidth + wire / 2 * link.combine


def crossover(link, group):
    """Bytes below which a butterfly is faster than halving, in groups of a power of two above 2."""
    rounds = group.bit_length() - 1
    share = 1 - 0.5**rounds
    return rounds * link.latency / ((rounds - 2 * share) / link.bandwidth + (rounds - share) * link.combine)


def reduce_scatter(link, size, group):
    return all_gather(link, size, group) + wire_bytes("reduce-scatter", size, group) * link.combine


def all_gather(link, size, group):
    return (group - 1) * link.latency + wire_bytes("all-gather", size, group) / link.bandwidth


def all_to_all(link, size, group):
    return (group - 1) * link.latency + wire_bytes("all-to-all", size, group) / link.bandwidth


def fold(link, size, group):
    return 0.0 if group & (group - 1) == 0 else 2 * link.time(size) + link.combine * size


def two_levels(link, size, group):
    inside = in_a_node(group)
    piece, nodes = size / inside, group // inside
    latencies = 2 * (inside - 1) + 2 * (nodes - 1)
    wire = wire_bytes("all-reduce", size, inside) + wire_bytes("all-reduce", piece, nodes)
    return latencies * link.latency + wire / link.bandwidth + wire / 2 * link.combine


def in_a_node(group):
    """Devices of a node where none is said: the smallest divisor that is not below the root of their number."""
    return min(size for size in range(1, group + 1) if group % size == 0 and size**2 >= group)


def data_parallel_root(parameters, logits, group):
    """Bytes that the root of `nn.DataParallel` sends in a step, and as many come back; `logits` are of one device.

    Down go parameters and gradients of logits, up logits and gradients of parameters.
    """
    return (group - 1) * (parameters + logits)


ALL_REDUCE = {"ring": ring, "halving": halving, "butterfly": butterfly, "tree": tree, "two_levels": two_levels}


def traffic(name, group, size):
    """Messages and bytes of a collective, of all devices together, of arrays of so many bytes (a multiple of all).

    Those of a gather and a scatter: the piece of a device passes through as many others as its place has bits that
    are set, those of an all-reduce of p = 2^k of P devices: the r = P - p others give all they have, and get it back.
    """
    k = group.bit_length() - 1
    power, rest, inside = 1 << k, group - (1 << k), in_a_node(group)
    passed = sum(place.bit_count() for place in range(group))
    return {
        "send": (1, size),
        "broadcast": (group - 1, (group - 1) * size),
        "reduce": (group - 1, (group - 1) * size),
        "gather": (group - 1, passed * size // group),
        "scatter": (group - 1, passed * size // group),
        "all_gather": (group * (group - 1), (group - 1) * size),
        "reduce_scatter": (group * (group - 1), (group - 1) * size),
        "all_to_all": (group * (group - 1), (group - 1) * size),
        "ring": (2 * group * (group - 1), 2 * (group - 1) * size),
        "tree": (2 * (group - 1), 2 * (group - 1) * size),
        "butterfly": (power * k + 2 * rest, (power * k + 2 * rest) * size),
        "halving": (2 * power * k + 2 * rest, 2 * (power - 1 + rest) * size),
        "two_levels": (2 * group * (inside - 1 + group // inside - 1), 2 * (group - 1) * size),
    }[name]
