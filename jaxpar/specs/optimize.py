"""Solves the integer program of `formulation.py` exactly, with a lower bound; of near ties the simplest choice wins."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jaxpar.errors import JaxparError, refuse
from jaxpar.specs.collectives import RepeatedCollective
from jaxpar.specs.formulation import ActivationGather, Formulation
from jaxpar.specs.integer_program import Row, minimize, vector
from jaxpar.units import show_bytes

WHOLE = 0.1  # if matmuls must be split: the share of the FLOP that every device may repeat
NODES = 500  # limit of the search tree; not a time limit, because all processes of a job must find the same specs
TIE = 0.02  # choices that cost at most this share more than the best one count as equal


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The dims that each axis cuts, and the predicted cost.

    Attributes:
      axes: Maps each class of pieces that is cut to the indices of the axes that cut it.
      idle: Indices of the axes that cut no matmul, convolution or lookup: at most parameters that no such operation
        reads, or that the loss does not use.
      cost: Seconds of the modelled step.
      best: Seconds of the cheapest choice; this one is the simplest that costs at most `TIE` more.
      bound: Seconds below which no choice can cost, by the linear relaxation and the solver's search.
      relaxed: The optimum of the linear relaxation, in seconds.
      seconds: Seconds that building and solving took.
      memory: Bytes of parameters, gradients, optimizer state and saved activations on a device.
      collectives: Collectives of a step over the axes.
      work: A device's FLOP, divided by its FLOP without the axes: 1 / n if n devices split all operations.
      kept: A device's bytes of saved activations, divided by the same bytes without the axes.
      gather_shares: Maps the class of an array that XLA gathers once for the forward and the backward pass to the share
        of the array that a device keeps in between.
      size: Numbers of columns and rows of the integer program.
    """

    axes: Mapping[int, tuple[int, ...]]
    idle: tuple[int, ...]
    cost: float
    best: float
    bound: float
    relaxed: float
    seconds: float
    memory: float
    collectives: tuple[RepeatedCollective, ...]
    work: float
    kept: float
    gather_shares: Mapping[int, float]
    size: tuple[int, int]

    @property
    def cut(self) -> frozenset[int]:
        """The classes of pieces that are cut."""
        return frozenset(self.axes)

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes that a device sends over the axes in a step, by kind of collective."""
        return self._traffic(self.collectives)

    def traffic_over(self, axis: int) -> dict[str, float]:
        """Returns the bytes that a device sends over the axis with this index in a step, by kind of collective."""
        return self._traffic(sent for sent in self.collectives if sent.axis == axis)

    def _traffic(self, collectives: Iterable[RepeatedCollective]) -> dict[str, float]:
        totals: defaultdict[str, float] = defaultdict(float)
        for sent in collectives:
            totals[sent.kind] += sent.times * sent.bytes
        return dict(totals)

    @property
    def gap(self) -> float:
        """How far the cheapest choice may be above the true optimum, as a share of its cost."""
        return (self.best - self.bound) / self.best if self.best else 0.0


def _kept_gathers(gathers: Iterable[ActivationGather], values: np.ndarray) -> dict[int, float]:
    """Returns the largest share of each class of arrays of which both passes read the same view after a gather."""
    passes: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    shares: dict[tuple[int, int], float] = {}
    for gather in gathers:
        key = gather.array, gather.view
        used = {name for name, users in gather.users.items() if any(values[column] > 0.5 for column in users)}
        passes[key] |= used
        shares[key] = max(shares.get(key, 0.0), gather.share if used else 0.0)
    kept: dict[int, float] = {}
    for (array, view), names in passes.items():
        if len(names) > 1:
            kept[array] = max(kept.get(array, 0.0), shares[array, view])
    return kept


class SpecsSolver(Formulation):
    """The integer program of one traced program, and its solution."""

    def solve(
        self,
        *,
        memory: float | None = None,
        least: bool = False,
        split: bool = False,
    ) -> Solution:
        """Solves the program exactly, and takes the simplest choice within `TIE` of the best.

        Args:
          memory: Bytes that parameters, state and kept activations may take on a device.
          least: Whether to minimize memory instead of seconds.
          split: Whether each axis must cut nine tenths of the FLOP of the matmuls that it can cut, and the axes half of
            the bytes of the parameters that they can cut.

        Raises:
          JaxparError: If no choice fits in `memory`; the message has the least bytes that any choice needs.
        """
        start, columns = time.perf_counter(), len(self._cost)
        rows, upper = self._limited_rows(memory, split=split), np.where(np.array(self._binary), 1.0, np.inf)
        scale, cost = (1e-6, vector(self._memory, columns)) if least else (1e6, np.array(self._cost))
        run = partial(minimize, upper=upper, binary=np.array(self._binary), nodes=NODES)
        found = run(cost * scale, rows)
        if found.x is None:
            raise self._impossible(memory)
        relaxed = minimize(cost * scale, rows, upper=upper, binary=np.zeros(columns))
        constant = self._memory_whole if least else self._constant
        best = found.fun / scale + constant
        bound = relaxed.fun if found.mip_dual_bound is None else max(found.mip_dual_bound, relaxed.fun)
        values = found.x
        if not least:
            rows.append((dict(enumerate(cost * scale)), -np.inf, ((1 + TIE) * best - constant) * scale))
            simplest = run(vector(self._complexity, columns) + cost / (best or 1.0), rows, nodes=NODES // 10)
            values = values if simplest.x is None else simplest.x
        total = lambda amounts: sum(amount * values[column] for column, amount in amounts.items())  # noqa: E731
        done = sum(flop * sum(values[k] / n for k, n in devices.items()) for devices, flop in self._flop)
        done += total(self._repeated)
        axes: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
        for (axis, state), column in self.cut_columns.x.items():
            axes[state] += (axis,) if values[column] > 0.5 else ()
        return Solution(
            axes={state: numbers for state, numbers in axes.items() if numbers},
            idle=tuple(axis for axis, cuts in enumerate(self._cuts) if not any(values[k] > 0.5 for k in cuts)),
            cost=float(cost @ values) + constant,
            best=best,
            bound=min(bound, found.fun) / scale + constant,
            relaxed=relaxed.fun / scale + constant,
            seconds=time.perf_counter() - start,
            memory=self._memory_whole + total(self._memory),
            collectives=tuple(
                replace(collective, times=collective.times * float(values[column]))
                for column, collective in self._collectives
                if values[column] > 1e-6 and collective.bytes
            ),
            work=done / max(sum(flop for _, flop in self._flop), 1.0),
            kept=(self._kept_whole + total(self._kept)) / max(self._kept_whole, 1.0),
            gather_shares=_kept_gathers(self._gathers.values(), values),
            size=(columns, len(self._rows)),
        )

    def least_without(self, states: Iterable[int], *, memory: float | None = None, split: bool = False) -> float:
        """Returns a lower bound of the seconds if these classes stay uncut; infinite if there is no such choice."""
        columns = len(self._cost)
        rows, upper = self._limited_rows(memory, split=split), np.where(np.array(self._binary), 1.0, np.inf)
        states = {*states}
        upper[[column for (_, state), column in self.cut_columns.x.items() if state in states]] = 0.0
        relaxed = minimize(np.array(self._cost) * 1e6, rows, upper=upper, binary=np.zeros(columns))
        return np.inf if relaxed.x is None else relaxed.fun / 1e6 + self._constant

    def _limited_rows(self, memory: float | None, *, split: bool) -> list[Row]:
        """Returns the rows of the program, and those that limit the memory and the uncut work."""
        rows = list(self._rows)
        if memory is not None:
            rows.append((dict(self._memory), -np.inf, memory - self._memory_whole))
        if split:
            for axis, whole in enumerate(self._whole_work):
                rows.append((whole, -np.inf, WHOLE * self._work_of(axis)))
            sizes: defaultdict[int, float] = defaultdict(float)
            params = [array for array in self.program.params.values() if self.cut_columns.of_array(array)]
            for array in params:
                for column in self.cut_columns.of_array(array).values():
                    sizes[column] += array.bytes
            rows.append((dict(sizes), sum(array.bytes for array in params) / 2, np.inf))
        return rows

    def _work_of(self, axis: int) -> float:
        """Returns the FLOP of the operations that an axis can cut."""
        whole = self._whole_work[axis]
        return sum(flop for columns, flop in self._flop if any(column in whole for column in columns))

    def splits_parameters(self, solution: Solution) -> bool:
        """Whether a solution cuts any parameter."""
        return any(
            solution.cut & {state for states in self.cut_columns.of_array(array) for state in states}
            for array in self.program.params.values()
        )

    def _impossible(self, memory: float | None) -> JaxparError:
        axes = "axis" if len(self.sizes) == 1 else "axes"
        least = self.solve(least=True).memory
        if memory is None or least <= memory:
            return refuse(
                f"specs over {self.n} devices of the {axes}",
                rule="an axis must split matmuls of the model, but its size divides no suitable dims of this model",
                fix="a smaller axis, whose size divides heads and hidden dims; or the axis left out",
            )
        return refuse(
            f"{show_bytes(int(memory or 0))} per device over {self.n} devices of the {axes}",
            rule="parameters, their state and saved activations fit; any choice of dims needs at least "
            f"{show_bytes(int(least))}",
            fix=f"memory of {math.ceil(least / 2**20)} MiB, more devices, fewer examples per device, or remat",
        )
