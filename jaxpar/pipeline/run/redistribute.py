"""Moves layers from the stages that store them to the stages that run them, and gradients back.

    stored   stage d holds layers  d L/P ... (d+1) L/P - 1       in order of depth, for every schedule
    running  stage d holds its chunks in sequence

With one chunk both are the same. With v chunks each parameter is sent once along `pipe` per step, in v permutes of 1/v
of a stage each, and each gradient is sent back. If each part is an edge from its storing to its running stage, the
parts form a bipartite graph of degree v, which splits into v permutations (König 1916).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.pipeline.tables.schedule import StageCut


def permutation_rounds(cut: StageCut) -> list[list[int]]:
    """Splits the parts into rounds, in which every stage sends one part and receives one.

    A bipartite graph with v edges at every node splits into v perfect matchings; each is found by augmenting paths.
    """
    unsent = [set(range(stage * cut.chunks, (stage + 1) * cut.chunks)) for stage in range(cut.stages)]
    permutations = []
    # after each round every stage has one part less to send and to receive, so another perfect matching exists
    for _ in range(cut.chunks):
        sends: dict[int, int] = {}  # stage that runs to the part that goes there

        def match(stage: int, visited: set[int], sends=sends) -> bool:
            # finds a receiver for this stage; a taken one is freed if its sender finds another
            for part in sorted(unsent[stage]):
                receiver, _ = cut.locate(part)
                if receiver not in visited:
                    visited.add(receiver)
                    if receiver not in sends or match(sends[receiver] // cut.chunks, visited):
                        sends[receiver] = part
                        return True
            return False

        for stage in range(cut.stages):
            match(stage, set())
        parts = sorted(sends.values())
        permutations.append(parts)
        for stage, part in enumerate(parts):
            unsent[stage].remove(part)
    return permutations


def padded_layers(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Pads stages with different numbers of layers; returns the layer at each place, and the place of each layer.

    Arrays sharded over `pipe` need the same number of places on all stages; spare places hold layer 0, unused.

    >>> padded_layers((2, 1))
    (array([0, 1, 2, 0]), array([0, 1, 2]))
    """
    longest, starts = max(counts), np.cumsum([0, *counts[:-1]])
    places = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    layers = [layer for stage_places in places for layer in [*stage_places, *[0] * (longest - len(stage_places))]]
    return np.array(layers), np.concatenate([longest * s + np.arange(n) for s, n in enumerate(counts)])


def redistribute_layers(mesh: Mesh, cut: StageCut, layers: Any, *, reverse: bool = False) -> Any:
    """Moves layers from the stages that store them to the stages that run them.

    Args:
      mesh: A mesh with an axis `pipe`.
      cut: The parts of the model and their stages.
      layers: Arrays whose dim 0 is layers, sharded over `pipe`; the sharding of other dims does not change.
      reverse: Whether to move them from the running to the storing stages instead.
    """
    if all(cut.locate(part) == divmod(part, cut.chunks) for part in range(cut.parts)):
        return layers  # every stage runs the parts that it stores
    order = permutation_rounds(cut)
    stored = np.array([[part % cut.chunks for part in parts] for parts in order], np.int32)
    run = np.zeros_like(stored)
    for index, parts in enumerate(order):
        for part in parts:
            stage, chunk = cut.locate(part)
            run[index, stage] = chunk
    pairs = [[(part // cut.chunks, cut.locate(part)[0]) for part in parts] for parts in order]
    if reverse:
        stored, run = run, stored
        pairs = [[(receiver, origin) for origin, receiver in entry] for entry in pairs]

    def redistribute(sources, targets, layers):
        def redistribute_array(x):
            x = x.reshape(cut.chunks, -1, *x.shape[1:])
            out = jnp.zeros_like(x)
            for index, entry in enumerate(pairs):  # one permute per round: each stage sends one part and receives one
                piece = jax.lax.dynamic_index_in_dim(x, sources[index, 0], 0, keepdims=False)
                piece = jax.lax.ppermute(piece, "pipe", entry)
                out = jax.lax.dynamic_update_index_in_dim(out, piece, targets[index, 0], 0)
            return out.reshape(-1, *x.shape[2:])

        return jax.tree.map(redistribute_array, layers)

    entry = PartitionSpec(None, "pipe")
    specs: Mapping = {"in_specs": (entry, entry, PartitionSpec("pipe")), "out_specs": PartitionSpec("pipe")}
    return jax.shard_map(redistribute, mesh=mesh, axis_names={"pipe"}, check_vma=False, **specs)(stored, run, layers)
