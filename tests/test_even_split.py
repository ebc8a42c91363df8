"""Layers that all cost the same are dealt so that the fullest stage has least to do."""

from itertools import pairwise, product

import pytest
from balanced import balance

from jaxpar.errors import JaxparError
from jaxpar.plan.rules.uneven_layers import Split, split


def test_split_equals_the_balanced_chain_and_every_split():
    for layers, stages in product(range(1, 9), range(1, 5)):
        for head, embedding in product((0.0, 0.4, 1.3, 5.0), (0.0, 0.4, 2.0)):
            if stages > layers:
                continue
            found = split(layers, stages, head=head, embedding=embedding)
            every = [each for each in product(range(1, layers + 1), repeat=stages) if sum(each) == layers]
            assert sum(found.layers) == layers
            assert found.share == pytest.approx(
                min(Split(layers=one, head=head, embedding=embedding).share for one in every)
            )
            chain = [1.0] * layers
            chain[0] += embedding
            chain[-1] += head
            cuts = balance(chain, stages)
            assert max(found.work) == pytest.approx(max(sum(chain[a:b]) for a, b in pairwise(cuts)))


def test_split_says_what_one_program_pays_for_it():
    found = split(8, 4, head=1.3)
    assert (found.layers, found.even.layers) == ((3, 2, 2, 1), (2, 2, 2, 2))
    assert (found.share, found.even.share) == (pytest.approx(3 / 9.3), pytest.approx(3.3 / 9.3))
    assert (found.tick, found.even.tick) == (pytest.approx(4.3), pytest.approx(3.3))
    assert "fullest stage has 32.3% of the work, 35.5% if even" in str(found)
    assert split(8, 4, head=0.3).layers == (2, 2, 2, 2)
    assert split(7, 4, head=0.9).layers == (2, 2, 2, 1)


def test_the_ends_meet_on_a_single_stage():
    one = split(4, 1, head=1.0, embedding=0.5)
    assert (one.work, one.share, one.tick) == ((5.5,), 1.0, 5.5)


@pytest.mark.parametrize(
    ("given", "costs", "got", "fix"),
    [
        ((2, 3), {}, "2 layers on 3 stages", "stages = 1"),
        ((0, 0), {}, "0 layers on 0 stages", "stages = 1"),
        ((4, 2), {"head": -1.0}, "head = -1.0", "head = 0.0"),
        ((4, 2), {"embedding": float("nan")}, "embedding = nan", "embedding = 0.0"),
    ],
)
def test_refusals(given, costs, got, fix):
    with pytest.raises(JaxparError) as refusal:
        split(*given, **costs)
    assert (refusal.value.problems[0].got, refusal.value.problems[0].fix) == (got, fix)
