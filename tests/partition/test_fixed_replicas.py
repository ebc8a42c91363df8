"""The best cut for given numbers of replicas, beside all cuts there are."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.mesh.chips import Link
from jaxpar.partition.chain import Chain
from jaxpar.partition.fixed_replicas import best_cut, cut_seconds

LINK = Link(latency=0.0, bandwidth=1e9)


def chain_of(layers):
    seconds, crossing, parameters = zip(*layers, strict=True)
    crossing = (*crossing[:-1], 0.0)
    seconds = (seconds[0] + 1e-3, *seconds[1:])
    return Chain(tuple(map(str, range(len(layers)))), seconds, parameters, crossing, crossing)


# few values, so that many cuts take the same time and the bytes decide
layers = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1e-3, 1.0137e-3, 2e-3, 5e-3]),
        st.sampled_from([0.0, 1e5, 1e6, 4e6]),
        st.sampled_from([0.0, 1e6, 4e8]),
    ),
    min_size=2,
    max_size=10,
)


@pytest.mark.nightly
@settings(deadline=None, max_examples=300)
@given(layers, st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_no_cut_is_2_percent_faster_and_none_so_fast_has_a_smaller_fullest_stage_or_sends_less(layers, replicas):
    chain, replicas = chain_of(layers), replicas[: len(layers)]

    def seconds(stages):
        return cut_seconds(chain, stages, replicas, LINK)

    def rank(stages):
        ends = np.cumsum(stages)
        fullest = max(sum(chain.parameters[end - n : end]) for end, n in zip(ends, stages, strict=True))
        return fullest, sum(chain.crossing[end - 1] for end in ends[:-1])

    count = len(layers)
    cuts = [np.diff([0, *ends, count]) for ends in combinations(range(1, count), len(replicas) - 1)]
    least = min(map(seconds, cuts))
    found = best_cut(chain, replicas, LINK)
    assert seconds(found) <= 1.02 * least * (1 + 1e-9)
    assert rank(found) == min(rank(cut) for cut in cuts if seconds(cut) <= 1.02 * least * (1 - 1e-9))


def test_more_stages_than_pieces_are_refused():
    with pytest.raises(JaxparError, match="2 pieces in 3 stages"):
        best_cut(chain_of([(1e-3, 1.0, 1.0), (1e-3, 1.0, 1.0)]), [1, 1, 1], LINK)
