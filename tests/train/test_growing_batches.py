"""Batches that grow where a rate would fall: phases, the order of examples, and runs of both."""

import io
import json

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.data.text import order
from jaxpar.errors import JaxparError
from jaxpar.job.build import rates
from jaxpar.job.check import check
from jaxpar.job.file.parse import load, loads
from jaxpar.job.run import train
from jaxpar.optim.optimizer import Growth, Optimizer
from jaxpar.train.feed import Feed, interleave

JOB = """
mesh.simulate = 8
parallel.data = 8
model = { name = "mlp", inputs = 8, layers = 1, dim = 8, hidden = 16 }
data = { source = "arrays", path = "PATH", held_out = 0.0 }
optimizer = { name = "sgd", beta1 = 0.5, learning_rate = 0.1, decay = "constant", clip = 0.0 }
train = { loss = "classify", steps = 14, global_batch = 16, accumulate = 2 }
checkpoint = { every = 7, keep_last = 9 }
metrics.noise_every = 1
"""


def test_draws_follow_one_another_and_double_with_the_batch():
    growth = Growth(((3, 2), (5, 2)))
    assert [list(growth.draws(step)) for step in range(6)] == [[0], [1], [2], [3, 4], [5, 6], [7, 8, 9, 10]]
    assert growth.describe(8) == "8 examples per step, 16 after 3, 32 after 5 steps: 3 programs"
    assert Growth().describe(8) == ""
    assert Growth().draws(7) == range(7, 8)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(2, 4)), max_size=4), st.integers(1, 7), st.integers(2, 60))
def test_no_example_is_left_out_and_none_comes_twice(lengths, batch, examples):
    begins = np.cumsum([length for length, _ in lengths])
    growth = Growth(tuple((int(begin), factor) for begin, (_, factor) in zip(begins, lengths, strict=True)))
    taken = [
        interleave([{"x": order(draw, batch, examples, seed=1)} for draw in growth.draws(step)])["x"]
        for step in range(int(begins[-1]) + 2 if lengths else 3)
    ]
    assert [len(each) for each in taken] == [batch * growth.factor(step) for step in range(len(taken))]
    # the examples of a batch that stays: each once in every epoch
    whole = [order(draw, batch, examples, seed=1) for draw in range(growth.total_draws(len(taken)))]
    np.testing.assert_array_equal(np.sort(np.concatenate(taken)), np.sort(np.concatenate(whole)))


def test_microbatches_and_shares_of_devices_are_those_of_the_draws():
    """So the losses of a run are the same bits on one process and on several, and memory stays as it is."""
    draws = [{"x": 100 * draw + np.arange(8)} for draw in range(3)]
    whole = interleave(draws)["x"]
    for accumulate in (1, 2):
        found = whole.reshape(-1, accumulate * 3).T  # microbatch i takes examples i, i + count, ...
        own = [draw["x"].reshape(-1, accumulate).T[part] for part in range(accumulate) for draw in draws]
        np.testing.assert_array_equal(found, own)
    half = interleave([{"x": draw["x"][4:]} for draw in draws])["x"]  # what the second of two processes holds
    np.testing.assert_array_equal(whole[12:], half)


def test_a_corrupt_draw_inside_of_a_step_is_passed_over(tmp_path):
    from jaxpar.data.validate import BatchSpec
    from jaxpar.train.faults import Faults, SkippedBatches

    class Source:
        fingerprint, examples = "mine", None

        def batch(self, step, size, rows=None):
            return {"x": np.full((size,), np.nan if step == 2 else step, np.float32)}

    layout = jp.compose(lambda rngs: nnx.Linear(2, 2, rngs=rngs), jp.Parallel(), jax.devices()[:1])
    feed = Feed(
        Source(), layout, 2, growth=Growth(((1, 2),)), good=BatchSpec(), faults=Faults(on_bad_batch="skip"),
        skipped=SkippedBatches(tmp_path, fresh=True), say=lambda _: None,
    )  # fmt: skip
    assert [sorted({*feed.read(step)["x"].tolist()}) for step in range(3)] == [[0], [1, 3], [4, 5]]
    again = Feed(Source(), layout, 2, growth=Growth(((1, 2),)), skipped=SkippedBatches(tmp_path, fresh=False))
    assert sorted({*again.read(2)["x"].tolist()}) == [4, 5]


def test_a_rate_drops_by_its_factors_after_as_many_examples():
    spec = Optimizer(learning_rate=0.8, decay="constant", drops=((4, 2), (6, 4)))
    rate = rates(spec, 10)
    assert [rate(step) for step in (0, 3, 4, 5, 6, 9)] == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.1, 0.1])
    scaled = Optimizer(learning_rate=0.8, drops=((4, 2), (6, 4)), reference_batch=8).for_batch(16)
    assert scaled.drops == ((2, 2), (3, 4))


def written(tmp_path, name="job"):
    rng = np.random.default_rng(0)
    data = tmp_path / "data.npz"
    np.savez(data, inputs=rng.normal(size=(8192, 8)).astype(np.float32), labels=rng.integers(0, 10, 8192))
    job = tmp_path / f"{name}.toml"
    job.write_text(JOB.replace("PATH", str(data)))
    return job


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key} for row in found]


@pytest.mark.nightly
def test_growing_the_batch_is_as_hot_as_dropping_the_rate_and_resumes_inside_of_a_phase(tmp_path):
    """Smith, Kindermans, Ying, Le (2018): equal noise scales at equal examples, within 1 %."""
    job = written(tmp_path)
    grow = ["train.grow=[[6, 2], [10, 2]]", f"run.dir={tmp_path / 'grow'}"]
    out = io.StringIO()
    train(load(job, grow), stream=out)
    grown = rows(tmp_path / "grow")
    train(load(job, grow), at=7, stream=io.StringIO())  # in the second phase
    assert rows(tmp_path / "grow") == grown
    assert "16 examples per step, 32 after 6, 64 after 10 steps: 3 programs" in out.getvalue()
    # 6 x 16, 4 x 32, 4 x 64 examples: of the other 6, 8 and 16 steps
    drop = ["optimizer.drops=[[6, 2], [14, 2]]", "train.steps=30", f"run.dir={tmp_path / 'drop'}"]
    train(load(job, drop), stream=io.StringIO())
    dropped = rows(tmp_path / "drop")
    assert [row["global_batch"] for row in grown] == [16] * 6 + [32] * 4 + [64] * 4 == [row["tokens"] for row in grown]
    ends = np.cumsum([row["global_batch"] for row in grown])
    assert ends[-1] == 16 * len(dropped)
    at = [dropped[int(end) // 16 - 1] for end in ends]
    hot, cold = ([row["noise_temperature"] for row in each] for each in (grown, at))
    np.testing.assert_allclose(hot, cold, rtol=0.01)
    assert min(hot) < 0.26 * max(hot)  # and they do fall
    assert [row["loss"] for row in grown[:6]] == [row["loss"] for row in dropped[:6]]


@pytest.mark.parametrize(
    ("overrides", "got", "fix"),
    [
        (["train.grow=[[3, 2], [3, 2]]"], "a phase begins after 3 steps", "[4, 2]"),
        (["train.grow=[[0, 2]]"], "a phase begins after 0 steps", "[1, 2]"),
        (["train.grow=[[14, 2]]"], "a phase begins after 14 steps", "[1, 2]"),
        (["train.grow=[[3, 1]]"], "a factor of 1", "[3, 2]"),
        (["train.grow=[[3, 2.5]]"], "train.grow.0.1 = 2.5", "default: []"),
        (["train.grow=[[3]]"], "train.grow.0", "default: []"),
        (["train.grow=[[3, 2000000000]]"], "train.grow to 32000000000", "smaller"),
        (["optimizer.drops=[[3, 0.5]]"], "optimizer.drops = [[3, 0.5]]: a factor of 0.5", "[3, 2]"),
    ],
)
def test_a_batch_that_cannot_grow_so_is_refused_in_one_message(tmp_path, overrides, got, fix):
    try:
        problems = check(loads(written(tmp_path).read_text(), ["metrics.noise_every=0", *overrides]))
    except JaxparError as error:
        problems = error.problems
    (problem,) = problems
    assert got in problem.got
    assert fix in problem.fix


def test_a_pipeline_does_not_grow_its_batch():
    job = "mesh.simulate = 8\nparallel = { data = 4, pipe = 2 }\ntrain = { grow = [[3, 2]], global_batch = 64 }"
    (problem,) = check(loads(job))
    assert "train.grow with pipe=2" in problem.got
    assert "optimizer.drops" in problem.fix
