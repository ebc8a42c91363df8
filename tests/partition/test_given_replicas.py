"""The best cut for given numbers of replicas, beside all cuts there are."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.mesh.chips import Link
from jaxpar.partition.chain import Chain
from jaxpar.partition.given_replicas import best_cut, cut_seconds

LINK = Link(latency=0.0, bandwidth=1e9)


def chain_of(layers):
    seconds, crossing = zip(*layers, strict=True)
    crossing = (*crossing[:-1], 0.0)
    seconds = (seconds[0] + 1e-3, *seconds[1:])
    return Chain(tuple(map(str, range(len(layers)))), seconds, (0.0,) * len(layers), crossing, crossing)


# few values, so that many cuts take the same time and the bytes decide
layers = st.lists(
    st.tuples(st.sampled_from([0.0, 1e-3, 2e-3, 5e-3]), st.sampled_from([0.0, 1e5, 1e6, 4e6])), min_size=2, max_size=10
)


@settings(deadline=None, max_examples=300)
@given(layers, st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_no_cut_is_faster_and_none_as_fast_sends_less(layers, replicas):
    chain, replicas = chain_of(layers), replicas[: len(layers)]

    def cost(stages):
        ends = np.cumsum(stages)[:-1]
        return round(cut_seconds(chain, stages, replicas, LINK), 12), sum(chain.crossing[end - 1] for end in ends)

    count = len(layers)
    cuts = (np.diff([0, *ends, count]) for ends in combinations(range(1, count), len(replicas) - 1))
    assert cost(best_cut(chain, replicas, LINK)) == min(map(cost, cuts))


def test_more_stages_than_pieces_are_refused():
    with pytest.raises(JaxparError, match="2 pieces in 3 stages"):
        best_cut(chain_of([(1e-3, 1.0), (1e-3, 1.0)]), [1, 1, 1], LINK)
