"""Random layouts, equally many of every kind: tests predictions also on layouts that the planner would not choose."""

from collections import defaultdict

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import AXES
from jaxpar.plan.enumeration import select_one
from jaxpar.plan.search import Question, Ranked, predict
from jaxpar.plan.techniques.table import TECHNIQUES

# largest axis that splits a model, most microbatches: more are legal, but nobody would run them
MOST, MICROBATCHES = 16, 64
ROOM = 1.5  # times a device's memory: layouts that do not fit are compiled too


def sample(question: Question, count: int, *, seed: int = 0) -> list[Ranked]:
    """Draws random layouts, independently of their predictions, and predicts them.

    Draws one layout of each kind in turn; a kind is the set of axes that split the model, and the ZeRO stage.

    Args:
      question: Model, devices, batch, hardware.
      count: Number of layouts.
      seed: Random seed.

    Raises:
      JaxparError: If there are fewer legal layouts.
    """
    candidates = question.legal()
    usual = question.bytes(candidates).total < ROOM * question.memory_limit
    usual &= candidates.microbatches <= MICROBATCHES
    splitting = [axis for axis, entry in AXES.items() if entry.splits and axis in TECHNIQUES]
    for axis in splitting:
        usual &= candidates.size(axis) <= MOST
    possible = int(usual.sum())
    if not 1 <= count <= possible:
        raise refuse(f"{count} layouts of {possible}", rule="at least one, and no more than there are", fix="30")
    kinds = defaultdict(list)
    # permutes all candidates: the draw does not change with the formulas
    for i in np.random.default_rng(seed).permutation(len(usual)).tolist():
        if usual[i]:
            split_axes = (bool(candidates.sizes[axis][i] > 1) for axis in splitting)
            kinds[*split_axes, int(candidates.zero[i])].append(i)
    longest = max(len(entry) for entry in kinds.values())
    chosen_indices = [kinds[kind][rank] for rank in range(longest) for kind in sorted(kinds) if rank < len(kinds[kind])]
    return [predict(question, select_one(candidates, i)) for i in chosen_indices[:count]]
