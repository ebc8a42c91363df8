"""The learning rate is that of optax, and the documentation of warmup and final says which step has which."""

import pytest

from jaxpar.optim.optax_chain import schedule
from jaxpar.optim.optimizer import Optimizer


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_the_last_step_has_one_share_more_than_final_and_the_count_after_it_has_final(final):
    rate = schedule(Optimizer(learning_rate=0.01, warmup=2, decay="linear", final=final), 6)
    assert float(rate(6)) == pytest.approx(0.01 * final)
    assert float(rate(5)) == pytest.approx(0.01 * (final + (1 - final) / (6 - 2)))


@pytest.mark.parametrize("warmup", [1, 2, 5])
def test_the_first_step_of_a_warm_up_has_rate_zero_and_the_one_after_it_the_highest(warmup):
    rate = schedule(Optimizer(learning_rate=0.01, warmup=warmup), 9)
    assert float(rate(0)) == 0
    assert float(rate(warmup)) == pytest.approx(0.01)


def test_the_documentation_says_so():
    said = " ".join(str(Optimizer.__doc__).split())
    assert "the first step has rate 0 and changes no parameter" in said
    assert "after the last step" in said
