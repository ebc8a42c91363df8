"""The plans that PipeDream's algorithm finds in its authors' profiles, run on narrow models.

    python pipedream_cuts.py NAME DEVICES

A profile has other layers than our pieces: a stage gets the pieces whose share of the layers with parameters it has.
"""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
from test_unequal_models import assert_alike
from unequal_models import GNMT, MODELS

import jaxpar as jp
from jaxpar.partition.chain import linearise, load
from jaxpar.partition.partitioner import partition

PROFILES = Path(__file__).parents[1] / "partition" / "pipedream"
LINK = 1.25e9  # 10 Gb/s, as the authors' machines


class DeepGNMT(GNMT):
    depth = 6


CASES = {
    "vgg16": ("vgg16", MODELS["vgg16"]),
    "alexnet": ("alexnet", MODELS["alexnet"]),
    "resnet": ("resnet50", MODELS["resnet"]),
    "gnmt": ("gnmt_large", replace(MODELS["gnmt"], make=DeepGNMT, bare=DeepGNMT, pieces=14)),
}


def plan(name, devices):
    """Returns the pieces and the replicas of each stage."""
    profile, entry = CASES[name]
    chain = linearise(load(PROFILES / f"{profile}.graph.txt"))
    found = partition(chain, ((devices, LINK),))
    layers, ends = sum(size > 0 for size in chain.parameters), [0]
    for later, stage in zip(range(len(found.stages) - 1, -1, -1), found.stages, strict=True):
        before = sum(size > 0 for size in chain.parameters[: stage.first + len(stage.layers)])
        ends.append(min(max(ends[-1] + 1, round(entry.pieces * before / layers)), entry.pieces - later))
    pieces = tuple(end - start for start, end in pairwise(ends))
    return pieces, tuple(stage.replicas for stage in found.stages)


def run(name, devices):
    """Asserts that the plan trains as Flax alone."""
    pieces, replicas = plan(name, devices)
    group = jp.Pipeline(stages=pieces, replicas=replicas).group
    microbatches = group * (2 if group > 1 else len(replicas))
    pipeline = jp.Pipeline(stages=pieces, replicas=replicas, schedule="1f1b", microbatches=microbatches)
    # all averages of ResNet are on one stage, and follow the microbatches of each of its replicas
    assert_alike(
        CASES[name][1], jp.Parallel(pipe=devices, pipeline=pipeline), microbatches=microbatches,
        replicas=replicas[0] if name == "resnet" else 1,
    )  # fmt: skip
    return "-".join(map(str, replicas))


if __name__ == "__main__":
    jp.simulate(int(sys.argv[2]))
    assert len(jax.devices()) == int(sys.argv[2])
    print(run(sys.argv[1], int(sys.argv[2])))
