"""Traces the loss of one microbatch, and finds the equations of each piece that the model gives to `jp.pipelined`.

    before ──► piece 0 ──► piece 1 ──► piece 2 ──► head and loss      one jaxpr; a scope names the piece of an equation

A stage runs consecutive pieces; the first also what comes before them, and the last what comes after.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.errors import JaxparError, refuse
from jaxpar.hlo.flop import equation_flop
from jaxpar.jaxprs.dataflow import CALLS, REMAT, PrunedJaxpr, Traced, inline_calls, split_groups
from jaxpar.jaxprs.lookups import demote_matmuls
from jaxpar.jaxprs.part_programs import Inputs, JaxprCut, PartProgram, state_of_parameters
from jaxpar.mesh.chips import Chip
from jaxpar.models.stack import SequentialLayers, intercept_layers
from jaxpar.parallel.layout import Layout
from jaxpar.partition.chain import Chain
from jaxpar.partition.traced_chain import crossing_bytes, pieces_between_equations, traced_chain
from jaxpar.sharding.names import Compute, Tree, nest
from jaxpar.step.checks.input_state import cast_to_initial
from jaxpar.step.losses import as_sums

_PIECE = re.compile(r"jp\.pipelined piece (\d+)")


@dataclass(frozen=True, eq=False)
class TracedPieces:
    """The loss of one microbatch.

    Attributes:
      name: Name of the model.
      traced: Maps (params, model state, batch) to (model state, sums).
      jaxpr: Its jaxpr; calls are inlined, but rematerialized blocks are not.
      params: Variables of the parameters.
      state: Variables of the model state.
      batch: Variables of the batch.
      new_state: Variables of the state after the microbatch.
      outs: Variables of the loss's sums and counts.
      sums: Structure of the sums.
      pieces: Number of pieces in `jp.pipelined`; 0 if the model does not call it.
    """

    name: str
    traced: Traced
    jaxpr: ClosedJaxpr
    params: Sequence[Var]
    state: Sequence[Var]
    batch: Sequence[Var]
    new_state: Sequence[Any]
    outs: Sequence[Any]
    sums: Any
    pieces: int

    @cached_property
    def updated_leaves(self) -> tuple[int, ...]:
        """Indices of the state that depends on parameters or on the batch, such as the averages of BatchNorm."""
        if not self.state:
            return ()
        groups = [len(self.params), len(self.state), len(self.batch)]
        params, state, batch = split_groups(self.traced.flat.jaxpr.invars, groups)
        new_state = self.traced.flat.jaxpr.outvars[: len(state)]
        return tuple(sorted(state_of_parameters(self.traced.flat, params, batch, state, new_state)))

    def compute_data_state(self, state: Sequence[jax.Array], count: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """Computes the state that is not in `updated_leaves` before each of `count` microbatches, and after the last.

        Args:
          state: The leaves of the state before the first microbatch.
          count: Number of microbatches.
        """
        others = [i for i in range(len(state)) if i not in self.updated_leaves]
        if not others:
            return [], []
        jaxpr = self.traced.flat.jaxpr
        ins = jaxpr.invars[len(self.params) :]
        step = PrunedJaxpr(jaxpr, [jaxpr.outvars[i] for i in others])  # the model itself does not run here

        def advance(leaves, _):
            return step(self.traced.flat.consts, {ins[i]: leaf for i, leaf in zip(others, leaves, strict=True)}), leaves

        last, each = jax.lax.scan(advance, [state[i] for i in others], length=count)
        return each, last

    @property
    def loss(self) -> int:
        """Index of the loss's sum in `outs`."""
        numbers = jax.tree.unflatten(self.sums, range(len(self.outs)))
        return numbers["loss"][0]

    def jaxpr_cut(self, *, train: bool) -> JaxprCut:
        """Returns the jaxpr with its inputs by kind; an evaluation updates no state."""
        kept = self.updated_leaves if train else ()
        data = [var for i, var in enumerate(self.state) if i not in kept]
        inputs = Inputs(params=self.params, data=[*data, *self.batch], state=[self.state[i] for i in kept])
        return JaxprCut(self.jaxpr, inputs)

    def parts(self, stages: Sequence[int], *, train: bool) -> list[PartProgram]:
        """Returns the programs of the parts, given the number of pieces of each part.

        Raises:
          JaxparError: If a part reads state that another part updates.
        """
        kept, count = self.updated_leaves if train else (), len(stages)
        part_of_piece = [part for part, number in enumerate(stages) for _ in range(number)]
        part_of = [part_of_piece[piece] for piece in self.piece_numbers]
        new_state = {i: self.new_state[index] for i, index in enumerate(kept)}
        cut = self.jaxpr_cut(train=train)
        parts = cut.parts(part_of, self.outs, new_state, count=count)
        # a result that depends on updated state differs between microbatches, and its backward runs after more updates
        if not PrunedJaxpr(self.jaxpr.jaxpr, self.outs).reads.isdisjoint(self.state[i] for i in kept):
            raise _later_state_error(self.name)
        for part in parts:
            if {*part.reads_state} - {*part.state}:
                raise _later_state_error(self.name)
        return parts

    @cached_property
    def piece_numbers(self) -> list[int]:
        """The piece of each equation: those before all pieces belong to the first, those after them to the last.

        A model that does not call `jp.pipelined` is divided between equations where few bytes have to be sent.
        """
        if not self.pieces:
            crossing = crossing_bytes(self.jaxpr_cut(train=False), self.outs)
            return pieces_between_equations(crossing, [equation_flop(eqn) for eqn in self.jaxpr.jaxpr.eqns])
        last = max(i for i, piece in enumerate(self._scope_pieces) if piece >= 0)
        within = [max(piece, 0) for piece in accumulate(self._scope_pieces[: last + 1], max)]
        return within + [self.pieces - 1] * (len(self._scope_pieces) - len(within))

    def chain(self, chip: Chip) -> Chain:
        """Returns the pieces as a chain of layers, timed on a chip."""
        return traced_chain(self.jaxpr_cut(train=False), self.outs, self.piece_numbers, equation_flop, chip)

    @cached_property
    def _scope_pieces(self) -> list[int]:
        """Returns the piece of each equation by its scope; -1 outside of all pieces."""
        found = (_PIECE.search(str(eqn.source_info.name_stack)) for eqn in self.jaxpr.jaxpr.eqns)
        return [int(match[1]) if match else -1 for match in found]


def trace_pieces(
    layout: Layout,
    loss: Callable,
    compute: Compute,
    cast: Callable,
    params: Mapping[str, object],
    state: Tree,
    batch: Tree,
) -> TracedPieces:
    """Traces the loss of one microbatch.

    Args:
      layout: The layout.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      compute: Training or evaluation, dtype, and rematerialization policy.
      cast: Casts a parameter to the dtype of matmuls.
      params: Path to the shape of every parameter.
      state: Shapes of the model state.
      batch: Shapes of a microbatch.

    Raises:
      JaxparError: If the model calls `jp.pipelined` more than once, not with a list of pieces, or in a loop or branch.
    """
    blueprint, calls = layout.blueprint, []

    def run_pieces(layers, x, per_layer):
        calls.append(layers)
        if per_layer or not isinstance(layers, SequentialLayers):
            return layers(x, *per_layer)
        for number, piece in enumerate(layers.layers):
            with jax.named_scope(f"jp.pipelined piece {number}"):
                x = piece(x)
        return x

    def run_loss(params, state, batch):
        tree = nest({tuple(path.split("/")): value for path, value in params.items()})
        model = blueprint.bind(tree, state, lambda path, value: cast(value), compute)
        with intercept_layers(run_pieces):
            sums = as_sums(loss(model, batch), accumulate=layout.microbatches)
        return cast_to_initial(blueprint.name, state, blueprint.collect(model)), sums

    traced = Traced(demote_matmuls(run_loss) if compute.dtype else run_loss, params, state, batch)
    _, sums = traced.shapes
    jaxpr = inline_calls(
        jaxpr_as_fun(traced.closed), traced.closed.in_avals, [name for name in CALLS if name not in REMAT]
    )
    groups = [len(jax.tree.leaves(tree)) for tree in (params, state, batch)]
    param_vars, state_vars, batch_vars = split_groups(jaxpr.jaxpr.invars, groups)
    new_state, outs = split_groups(jaxpr.jaxpr.outvars, [groups[1], len(jax.tree.leaves(sums))])
    pieces = _number_of_pieces(blueprint.name, calls)
    result = TracedPieces(
        blueprint.name, traced, jaxpr, param_vars, state_vars, batch_vars, new_state, outs,
        jax.tree.structure(sums), pieces,
    )  # fmt: skip
    if pieces and max(result._scope_pieces, default=-1) < 0:
        raise refuse(
            f"{blueprint.name} calls jp.pipelined inside of a loop, a branch, a derivative or nn.remat",
            rule="a pipeline cuts a model where it calls jp.pipelined(pieces, x), outside of all of these",
            fix="the loop, branch or derivative inside of a piece, or pipe=1",
        )
    return result


def _number_of_pieces(name: str, calls: Sequence[Callable]) -> int:
    if len(calls) > 1:
        raise refuse(
            f"{name} calls jp.pipelined {len(calls)} times",
            rule="a pipeline cuts a model where it calls jp.pipelined(pieces, x): once, with all of its pieces",
            fix="one list with the pieces of both",
        )
    pieces = calls[0].layers if calls and isinstance(calls[0], SequentialLayers) else ()
    return len(pieces)


def _later_state_error(name: str) -> JaxparError:
    return refuse(
        f"{name} computes with state that follows from earlier examples, while it trains",
        rule="in a pipeline the backward of a microbatch comes after later ones have updated this state",
        fix="state that only evaluations read, as BatchNorm's averages; or pipe=1",
    )
