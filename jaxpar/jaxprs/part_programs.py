"""Cuts a jaxpr into parts that run one after the other, on different devices.

    params 0     params 1     params 2
       │            │            │
    part 0 ──────► part 1 ────► part 2 ──► outs
       └─────────────────────────┘            a value goes from the part that computes it to each part that reads it

A value that depends on parameters and on data belongs to the part of its equation, and is sent. All other values are
computed in each part that reads them: a cast of a parameter, a mask that follows from the batch, a dropout key.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.jaxprs.dataflow import Env, PrunedJaxpr, dependent_variables, needed_equations, variables


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The inputs of a jaxpr by kind.

    Attributes:
      params: Parameters.
      data: Values that every part has: the batch, and state that does not depend on parameters.
      state: State that depends on parameters, such as the averages of BatchNorm; a part keeps what it updates.
    """

    params: Sequence[Var]
    data: Sequence[Var]
    state: Sequence[Var] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class PartProgram:
    """A part: what it reads, receives, sends and returns.

    Attributes:
      params: Indices of the parameters that it reads.
      receives: Maps the number of an earlier part to the variables that it sends to this one.
      sends: Maps the number of a later part to the variables that this one sends to it.
      state: Indices of the state that it updates.
      reads_state: Indices of the state that it reads.
    """

    jaxpr: ClosedJaxpr
    inputs: Inputs
    params: tuple[int, ...]
    receives: Mapping[int, tuple[Var, ...]]
    sends: Mapping[int, tuple[Var, ...]]
    state: tuple[int, ...] = ()
    reads_state: tuple[int, ...] = ()
    outs: tuple = ()
    state_outs: tuple = ()
    eqns: Sequence[JaxprEqn] = field(default=(), repr=False)

    def run(
        self,
        params: Mapping[int, jax.Array],
        data: Sequence[jax.Array],
        state: Mapping[int, jax.Array],
        received: Mapping[int, Sequence[jax.Array]],
    ) -> tuple[dict[int, list[jax.Array]], list[jax.Array], dict[int, jax.Array]]:
        """Runs the part.

        Args:
          params: Index of a parameter to its value; those in `params` suffice.
          data: All data.
          state: Index of state to its value; that in `reads_state` suffices.
          received: The values of `receives`, by number of the earlier part.

        Returns:
          The values of `sends`, the outs if this is the last part, and the new state by index.
        """
        inputs = self.inputs
        values = {inputs.params[i]: params[i] for i in self.params} | dict(zip(inputs.data, data, strict=True))
        values |= {inputs.state[i]: state[i] for i in self.reads_state}
        for source, variables_ in self.receives.items():
            values |= dict(zip(variables_, received[source], strict=True))
        env = Env(self.jaxpr.jaxpr, self.jaxpr.consts, values.items())
        for eqn in self.eqns:
            env.run(eqn)
        sent = {target: [env[var] for var in variables_] for target, variables_ in self.sends.items()}
        new_state = {i: env[var] for i, var in zip(self.state, self.state_outs, strict=True)}
        return sent, [env[var] for var in self.outs], new_state


class JaxprCut:
    """A jaxpr to be cut into parts, and the variables that one part may send to another.

    Attributes:
      jaxpr: The jaxpr.
      inputs: Its inputs by kind.
      sent: Variables that depend on both parameters and data. If another part reads one, it is sent to that part.
    """

    def __init__(self, jaxpr: ClosedJaxpr, inputs: Inputs):
        self.jaxpr, self.inputs = jaxpr, inputs
        eqns = jaxpr.jaxpr.eqns
        self.sent = dependent_variables(eqns, inputs.params) & dependent_variables(eqns, [*inputs.data, *inputs.state])

    def parts(
        self, part_of: Sequence[int], outs: Sequence, state: Mapping[int, Var] | None = None, *, count: int
    ) -> list[PartProgram]:
        """Returns the parts of a cut.

        Args:
          part_of: The part of each equation; it never decreases.
          outs: Variables that the last part computes.
          state: Index of state to the variable of its new value.
          count: Number of parts.
        """
        eqns = self.jaxpr.jaxpr.eqns
        home = {var: part for eqn, part in zip(eqns, part_of, strict=True) for var in eqn.outvars if var in self.sent}
        order = {var: i for i, var in enumerate(home)}
        is_sent = [not self.sent.isdisjoint(eqn.outvars) for eqn in eqns]
        sends: list[dict[int, list[Var]]] = [{} for _ in range(count)]
        updates: list[dict[int, Var]] = [{} for _ in range(count)]
        for i, var in (state or {}).items():
            updates[home.get(var, count - 1)][i] = var
        parts: list[PartProgram] = []
        for part in reversed(range(count)):
            part_eqns = [
                eqn for eqn, number, sent in zip(eqns, part_of, is_sent, strict=True) if number == part or not sent
            ]
            last = tuple(outs) if part == count - 1 else ()
            results = [*last, *updates[part].values(), *(var for sent in sends[part].values() for var in sent)]
            live_eqns, reads = needed_equations(part_eqns, results)
            computed = {var for eqn in live_eqns for var in eqn.outvars}
            receives: dict[int, list[Var]] = {}
            for var in sorted((reads & home.keys()) - computed, key=order.__getitem__):
                receives.setdefault(home[var], []).append(var)
            for source, variables_ in receives.items():
                sends[source][part] = variables_
            parts.append(
                PartProgram(
                    jaxpr=self.jaxpr,
                    inputs=self.inputs,
                    params=_indices(self.inputs.params, reads),
                    receives={source: tuple(variables_) for source, variables_ in sorted(receives.items())},
                    sends={target: tuple(variables_) for target, variables_ in sorted(sends[part].items())},
                    state=tuple(updates[part]),
                    reads_state=_indices(self.inputs.state, reads),
                    outs=last,
                    state_outs=tuple(updates[part].values()),
                    eqns=live_eqns,
                )
            )
        return parts[::-1]


def _indices(inputs: Iterable[Var], reads: set[Var]) -> tuple[int, ...]:
    return tuple(i for i, var in enumerate(inputs) if var in reads)


def state_of_parameters(
    jaxpr: ClosedJaxpr, params: Sequence[Var], batch: Sequence[Var], state: Sequence[Var], new_state: Sequence
) -> frozenset[int]:
    """Returns the indices of the state whose new values depend on parameters or on the batch."""
    eqns, reads, found = jaxpr.jaxpr.eqns, {}, set()
    while True:
        roots = {*params, *batch, *(state[i] for i in found)}
        dependent = dependent_variables(eqns, roots)
        # a loop over layers computes both their results and their random keys: only the latter's part of it counts
        for i, var in enumerate(new_state):
            if variables([var]) & dependent and i not in reads:
                reads[i] = PrunedJaxpr(jaxpr.jaxpr, [var]).reads
        grown = {i for i, read in reads.items() if read & roots}
        if grown == found:
            return frozenset(found)
        found = grown
