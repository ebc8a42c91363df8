"""What becomes of a model on a layout: equal to one device, refused, or the name of what went wrong.

    the test ──combinations──► a process of its own ──a line for each──► equal
                 ▲                     │                                 refused: what jaxpar said
                 │                     │                                 wrong: what differs
                 └── those after it ◄──┴── dies of one, or is silent ──► ended with -6: its last words; silent for 240 s

Several combinations share a process, whose start takes longer than most of them. The first without an outcome is the
one that it died of.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

LIMIT = 240.0  # seconds for one combination, on a machine that does other things too
STEPS = 3


@dataclass(frozen=True)
class Combination:
    """A model of `handwritten` and its loss, on a layout.

    Attributes:
      model: Which.
      loss: Which.
      sizes: Arguments of `jp.Parallel`.
      pipeline: Arguments of `jp.Pipeline`.
      numerics: Arguments of `jp.train_step`.
    """

    model: str
    loss: str
    sizes: dict[str, Any]
    pipeline: dict[str, Any] = field(default_factory=dict)
    numerics: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = [f"{key}={value}" for key, value in (self.sizes | self.pipeline | self.numerics).items()]
        return ", ".join([self.model, self.loss, *more])


def outcomes(combinations: list[Combination], *, limit: float = LIMIT) -> list[str]:
    """Returns the outcome of each combination; none of them can end or stop the process that asks."""
    found: list[str] = []
    while len(found) < len(combinations):
        found += _until_one_dies(combinations[len(found) :], limit)
    return found


def _until_one_dies(combinations: list[Combination], limit: float) -> list[str]:
    found: list[str] = []
    asked = json.dumps([asdict(each) for each in combinations])
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen([sys.executable, __file__, asked], stdout=subprocess.PIPE, stderr=said, bufsize=0) as process,
    ):
        assert process.stdout is not None
        try:
            while len(found) < len(combinations):
                if not select.select([process.stdout], [], [], limit)[0]:
                    return [*found, f"silent for {limit:g} s"]
                if not (line := process.stdout.readline()):
                    return [*found, f"ended with {process.wait()}: {_last_words(said)}"]
                found.append(json.loads(line))
            return found
        finally:
            process.kill()


def _last_words(said) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").splitlines()
    telling = (line for line in lines if "Check failed" in line or "Termination timeout" in line)
    return next(telling, lines[-1] if lines else "")[:300]


def outcome(combination: Combination) -> str:
    """Returns what becomes of a combination, in this process."""
    import jax
    import numpy as np
    from tiny import assert_same_arrays

    import jaxpar as jp
    from jaxpar.errors import JaxparError

    how = jp.Parallel(**combination.sizes, pipeline=jp.Pipeline(**combination.pipeline))
    want, reference = _alone(combination.model, combination.loss)
    try:
        got, params = _train(combination.model, combination.loss, how, jax.devices(), **combination.numerics)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert_same_arrays(params, reference)
    except JaxparError as error:
        return f"refused: {error}"
    except AssertionError as error:
        return f"wrong: {' '.join(str(error).split())[:300]}"
    return "equal"


@cache
def _alone(model: str, loss: str):
    import jax

    import jaxpar as jp

    return _train(model, loss, jp.Parallel(), jax.devices()[:1])


def _train(model: str, loss: str, how, devices, **numerics):
    import jax
    import optax
    from handwritten import LOSSES, MODELS, batches

    import jaxpar as jp

    chain = optax.sgd(0.1, momentum=0.9)  # a gradient that is off by a factor shows, which Adam would hide
    layout = jp.compose(MODELS[model], how, devices)
    state, step = jp.init_state(layout, chain, seed=1), jp.train_step(layout, LOSSES[loss], chain, **numerics)
    losses = []
    for batch in batches(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


if __name__ == "__main__":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "jaxpar-tests-cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    import jaxpar

    jaxpar.simulate(8)
    for each in json.loads(sys.argv[1]):
        print(json.dumps(outcome(Combination(**each))), flush=True)
