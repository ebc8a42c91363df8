"""Moves layers from the stages that store them to the stages that run them, and gradients back.

    stored   stage d holds layers  d L/P ... (d+1) L/P - 1       their natural order, whatever the schedule
    dealt    stage d holds its chunks, one after the other

With one chunk the two are the same. With v chunks each parameter makes one hop along `pipe` per step, in v permutes of
1/v of a stage each, and each gradient one hop back: the parts, as edges from the stage that stores them to the stage
that runs them, are v per stage on both sides, so they split in v permutations (König 1916).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.pipeline.tables.schedule import Cut


def rounds(cut: Cut) -> list[list[int]]:
    """Returns rounds of messages: in each, every stage sends one part and receives one.

    A bipartite graph with v edges at every node splits into v perfect matchings; each is found by augmenting paths.
    """
    left = [set(range(stage * cut.chunks, (stage + 1) * cut.chunks)) for stage in range(cut.stages)]
    found = []
    # after each round every stage has one part less to send and to receive, so another perfect matching exists
    for _ in range(cut.chunks):
        sends: dict[int, int] = {}  # stage that runs to the part that goes there

        def match(stage: int, seen: set[int], sends=sends) -> bool:
            # finds a receiver for this stage; one that is taken already is freed if its sender finds another one
            for part in sorted(left[stage]):
                to, _ = cut.place(part)
                if to not in seen:
                    seen.add(to)
                    if to not in sends or match(sends[to] // cut.chunks, seen):
                        sends[to] = part
                        return True
            return False

        for stage in range(cut.stages):
            match(stage, set())
        parts = sorted(sends.values())
        found.append(parts)
        for stage, part in enumerate(parts):
            left[stage].remove(part)
    return found


def padded(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for stages with different numbers of layers, the layer in each place, and the place of each layer.

    Arrays split over `pipe` need equally many places on all stages: spare places hold layer 0, which is not run.

    >>> padded((2, 1))
    (array([0, 1, 2, 0]), array([0, 1, 2]))
    """
    most, starts = max(counts), np.cumsum([0, *counts[:-1]])
    places = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    layers = [layer for each in places for layer in [*each, *[0] * (most - len(each))]]
    return np.array(layers), np.concatenate([most * s + np.arange(n) for s, n in enumerate(counts)])


def deal(mesh: Mesh, cut: Cut, layers: Any, *, back: bool = False) -> Any:
    """Returns the layers where they are run; with `back`, from there to where they are stored.

    Args:
      mesh: With an axis `pipe`.
      cut: How the model is cut.
      layers: Arrays with a leading dim of layers, split over `pipe`; other dims as they are.
      back: The other way.
    """
    if all(cut.place(part) == divmod(part, cut.chunks) for part in range(cut.parts)):
        return layers  # every stage runs the parts that it stores
    order = rounds(cut)
    stored = np.array([[part % cut.chunks for part in parts] for parts in order], np.int32)
    run = np.zeros_like(stored)
    for index, parts in enumerate(order):
        for part in parts:
            stage, chunk = cut.place(part)
            run[index, stage] = chunk
    pairs = [[(part // cut.chunks, cut.place(part)[0]) for part in parts] for parts in order]
    if back:
        stored, run = run, stored
        pairs = [[(to, origin) for origin, to in each] for each in pairs]

    def move(takes, puts, layers):
        def one(x):
            x = x.reshape(cut.chunks, -1, *x.shape[1:])
            out = jnp.zeros_like(x)
            for index, each in enumerate(pairs):  # one permute per round: each stage sends one part and receives one
                piece = jax.lax.dynamic_index_in_dim(x, takes[index, 0], 0, keepdims=False)
                piece = jax.lax.ppermute(piece, "pipe", each)
                out = jax.lax.dynamic_update_index_in_dim(out, piece, puts[index, 0], 0)
            return out.reshape(-1, *x.shape[2:])

        return jax.tree.map(one, layers)

    each = PartitionSpec(None, "pipe")
    specs: Mapping = {"in_specs": (each, each, PartitionSpec("pipe")), "out_specs": PartitionSpec("pipe")}
    return jax.shard_map(move, mesh=mesh, axis_names={"pipe"}, check_vma=False, **specs)(stored, run, layers)
