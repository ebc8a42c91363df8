"""Every exchange beside every technique: what `check` lets pass trains, and as it does without the technique.

A cell is "equal" (losses to 1e-5 of those of data alone), "like" (to 5 %: a device codes what it holds, so that codes
of other layouts round otherwise; and bfloat16), or "refused". The table is printed by
`pytest -s -n 0 -m "" tests/exchange/test_exchange_by_technique.py`.
"""

import functools

import jax
import numpy as np
import pytest

from jaxpar.errors import JaxparError
from jaxpar.exchange.table import EXCHANGES
from jaxpar.job.build import assemble
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads
from jaxpar.step.init_state import init_state

JOB = """
mesh.simulate = {devices}
parallel = {{ data = 2{parallel} }}
model = {{ layers = 2, dim = 32, heads = 4, vocab = 256, seq = 16 }}
data = {{ seq = 16 }}
optimizer = {{ learning_rate = 3e-3 }}
train = {{ global_batch = 8, steps = 3{train} }}
metrics = {{ noise_every = {noise} }}
"""
TECHNIQUES = {  # devices of a replica, [parallel], [train], steps between measurements of noise
    "zero 1": (2, ", fsdp = 2, zero = 1", "", 0),
    "zero 2": (2, ", fsdp = 2, zero = 2", "", 0),
    "zero 3": (2, ", fsdp = 2, zero = 3", "", 0),
    "tensor": (2, ", tensor = 2", "", 0),
    "sequence": (2, ", tensor = 2, sequence = true", "", 0),
    "fsdp x tensor": (4, ", fsdp = 2, tensor = 2", "", 0),
    "gather": (2, ', context = 2, context_by = "gather"', "", 0),
    "ring": (2, ', context = 2, context_by = "ring"', "", 0),
    "ulysses": (2, ', context = 2, context_by = "ulysses"', "", 0),
    "pipe": (2, ", pipe = 2, pipeline = { microbatches = 2 }", "", 0),
    "accumulate": (1, "", ", accumulate = 2", 0),
    "remat": (1, "", ', remat = "full"', 0),
    "noise": (1, "", "", 2),
    "bf16": (1, "", ', precision = "bf16"', 0),
}
EVERY = dict.fromkeys(("local", "diloco", "easgd"), "every = 2") | {"streaming": "every = 2, fragments = 2"}
FEW = "smallest = 256"  # so that matrices of this model are coded
SETTINGS = EVERY | dict.fromkeys(("qsgd", "ternary", "sign", "topk", "randomk", "sparse", "bf16"), FEW)
SETTINGS |= {"powersgd": f"{FEW}, rank = 4", "factors": f"{FEW}, rank = 4"}
CODED = ("bf16", "qsgd", "ternary", "sign", "topk", "randomk", "sparse", "powersgd", "factors")
REFUSED = ("ring", "ulysses", "pipe", "noise")  # beside replicas that make their steps apart


def job_of(exchange, technique):
    devices, parallel, train, noise = TECHNIQUES.get(technique, (1, "", "", 0))
    settings = ", " + SETTINGS[exchange] if exchange in SETTINGS else ""
    parallel += f', exchange = {{ name = "{exchange}"{settings} }}'
    text = JOB.format(devices=2 * devices, parallel=parallel, train=train, noise=noise)
    return loads(text)


@functools.cache
def trained(exchange, technique):
    """Returns the losses of 5 steps."""
    job = job_of(exchange, technique)
    step = assemble(job, jax.devices()[: job.mesh.simulate])
    state, losses, rng = init_state(step.layout, step.optimizer), [], np.random.default_rng(0)
    for _ in range(5):
        tokens = rng.integers(0, 64, (8, 17)).astype(np.int32)
        state, metrics = step(state, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
        losses.append(float(metrics["loss"]))
    return np.array(losses)


OFTEN = {("gossip", "gather"), ("topk", "fsdp x tensor"), ("easgd", "ring"), ("sign", "noise"), ("powersgd", "pipe")}
CELLS = [
    pytest.param(exchange, technique, marks=pytest.mark.slow if (exchange, technique) in OFTEN else pytest.mark.full)
    for exchange in sorted(EXCHANGES)
    for technique in TECHNIQUES
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("exchange", "technique"), CELLS)
def test_what_check_lets_pass_trains_as_without_the_technique(exchange, technique):
    try:
        problems = check(job_of(exchange, technique))
    except JaxparError as error:
        problems = error.problems
    refused = EXCHANGES[exchange].per_replica and technique in REFUSED
    assert bool(problems) == refused, problems
    if refused:
        assert all(problem.got and problem.rule and problem.fix for problem in problems)
        print(f"\n{exchange:<10} {technique:<14} refused")
        return
    losses, wanted = trained(exchange, technique), trained(exchange, "")
    assert np.isfinite(losses).all()
    loose = exchange in CODED or technique == "bf16"
    np.testing.assert_allclose(losses, wanted, rtol=0.05 if loose else 1e-5)
    print(f"\n{exchange:<10} {technique:<14} {'like' if loose else 'equal'} {np.abs(losses / wanted - 1).max():.1e}")
