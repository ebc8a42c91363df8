"""Layouts drawn by chance, of every kind alike: a prediction is not to be held only to what it would choose."""

from collections import defaultdict

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import AXES
from jaxpar.plan.enumerate import at
from jaxpar.plan.search import Question, Ranked, weigh
from jaxpar.plan.techniques.table import TECHNIQUES

MOST, MICROBATCHES = 16, 64  # devices that split a model along one axis: more are legal, and nobody would run them
ROOM = 1.5  # times a device's memory: what does not fit is compiled too


def sample(question: Question, count: int, *, seed: int = 0) -> list[Ranked]:
    """Returns layouts with their predictions, drawn without regard to them.

    In turn one of each kind: with or without each of the axes that split a model, of each ZeRO stage.

    Args:
      question: Model, devices, batch, hardware.
      count: How many.
      seed: Of the draw.

    Raises:
      JaxparError: If there are fewer legal layouts.
    """
    candidates = question.legal()
    usual = question.bytes(candidates).total < ROOM * question.room
    usual &= candidates.microbatches <= MICROBATCHES
    splitting = [axis for axis, each in AXES.items() if each.splits and axis in TECHNIQUES]
    for axis in splitting:
        usual &= candidates.size(axis) <= MOST
    possible = int(usual.sum())
    if not 1 <= count <= possible:
        raise refuse(f"{count} layouts of {possible}", rule="at least one, and no more than there are", fix="30")
    kinds = defaultdict(list)
    for i in np.random.default_rng(seed).permutation(len(usual)).tolist():  # of all: formulas change, a draw does not
        if usual[i]:
            cut = (bool(candidates.sizes[axis][i] > 1) for axis in splitting)
            kinds[*cut, int(candidates.zero[i])].append(i)
    turns = max(len(each) for each in kinds.values())
    drawn = [kinds[kind][turn] for turn in range(turns) for kind in sorted(kinds) if turn < len(kinds[kind])]
    return [weigh(question, at(candidates, i)) for i in drawn[:count]]
