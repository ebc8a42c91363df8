"""Computes non-parameter state (such as PRNG counters of dropout) at the start of every microbatch of a pipeline.

Microbatches overlap, so the state after a microbatch is not available to the next. If the new state does not depend on
the forward pass, the state before every microbatch can be computed before the first one runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import jax
from jax.extend.core import JaxprEqn, Var

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import PrunedJaxpr, Traced, split_groups, variables
from jaxpar.models.stack import call_at_layers, intercept_layers
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Compute, Tree, leaves_by_path, pick
from jaxpar.step.checks.input_state import cast_to_initial
from jaxpar.step.losses import as_sums
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.equal_layers import check_equal
from jaxpar.step.pipelined.loss_checks import AFTER, BEFORE, MarkedLoss, check_layerwise, check_one_pass, mark
from jaxpar.step.pipelined.shardings import Shardings
from jaxpar.step.state import fold_in_number


@dataclass(frozen=True, eq=False)
class ModelStates:
    """Computes the model state before every microbatch of a step. Refuses models that a pipeline cannot split.

    Attributes:
      shardings: The shardings of the pipelined step.
      layout: The layout between steps.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      numerics: Precision, remat and accumulation.
    """

    shardings: Shardings
    layout: Layout
    loss: Callable
    numerics: Numerics

    def before_microbatches(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> tuple[Tree, Tree]:
        """Returns the model state before each microbatch, stacked, and the state after the last.

        Raises:
          JaxparError: As for `trace_loss`, or if the model state depends on the forward pass.
        """
        traced, state = self.trace_loss(params, model_state, batch, train=True)
        jaxpr, count = traced.flat.jaxpr, self.shardings.layout.microbatches
        non_state_vars, ins = split_groups(jaxpr.invars, [len(jaxpr.invars) - state, state])
        # only the equations that compute the new state from the old: the model itself does not run here
        step = PrunedJaxpr(jaxpr, jaxpr.outvars[:state])
        if step.reads.intersection(non_state_vars):
            raise refuse(
                f"{self.layout.blueprint.name} keeps state that follows from what it computes, such as the averages of "
                "BatchNorm",
                rule="in a pipeline microbatches overlap, so the state after one is not available to the next",
                fix="LayerNorm or GroupNorm in place of BatchNorm, experts.balance_rate = 0 of a decoder, or pipe=1",
            )

        def advance(leaves, _):
            return step(traced.flat.consts, dict(zip(ins, leaves, strict=True))), leaves

        last, each = jax.lax.scan(advance, jax.tree.leaves(model_state), length=count)
        restored = partial(jax.tree.unflatten, jax.tree.structure(model_state))
        return restored(each), restored(last)

    def trace_loss(
        self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array], *, train: bool
    ) -> tuple[Traced, int]:
        """Traces a microbatch's loss, (params, batch, state) to (state, sums), and counts the leaves of the state.

        Raises:
          JaxparError: If the model does not call `jp.pipelined` exactly once, its layers close over parameters of other
            parts, or its loss reads other results of the layers than x.
        """
        blueprint = self.layout.blueprint
        compute = Compute(train=train, dtype=self.shardings.dtype, remat=self.numerics.remat)
        count = self.shardings.layout.microbatches
        calls: list = []

        def mark_layers(layers, x, per_layer):
            calls.append((layers, x, per_layer))
            return mark(layers(mark(x, BEFORE), *per_layer), AFTER)

        def bind(params, model_state):
            return blueprint.bind(params, model_state, lambda path, value: self.shardings.cast(value), compute)

        def run_loss(params, batch, model_state):
            model = bind(params, model_state)
            with intercept_layers(mark_layers):
                sums = as_sums(self.loss(model, batch), accumulate=count)
            return cast_to_initial(blueprint.name, model_state, blueprint.collect(model)), sums

        def run(params, model_state, batch):
            model = bind(params, model_state)
            return lambda: self.loss(model, batch)

        # tracing one microbatch suffices: all run one program, and only its dataflow matters
        microbatch = {key: value[: value.shape[0] // count] for key, value in batch.items()}
        traced = Traced(run_loss, params, microbatch, model_state)
        if len(calls) != 1:
            usage = f"calls jp.pipelined {len(calls)} times" if calls else "does not call jp.pipelined"
            raise refuse(
                f"{blueprint.name} {usage}",
                rule="a pipeline cuts a model where it calls jp.pipelined(layers, x): once, around its stack of layers",
                fix="x = jp.pipelined(layers, x) around the stack of equal layers, the largest of several; Decoder and "
                "ViT have it" + ("" if calls else '; or jp.Pipeline(stages="found"), which cuts any traced model'),
            )
        state = len(jax.tree.leaves(model_state))
        if train:  # an evaluation runs the same layers
            check_equal(self.layout, run, params, model_state, microbatch, calls[0])
            self._check_per_layer(run, params, model_state, microbatch, calls[0][2])
        jaxpr = traced.flat.jaxpr
        paths = dict(zip(jaxpr.invars, leaves_by_path(params), strict=False))
        loss = MarkedLoss(blueprint.name, jaxpr, jaxpr.outvars[state:])
        self._check_enclosed(loss.layers(), paths)
        loss.check({var: path for var, path in paths.items() if path not in self.shardings.shared_keys})
        return traced, state

    def _check_per_layer(self, run: Callable, params: Tree, model_state: Tree, batch: Tree, per_layer: Tree) -> None:
        """Refuses parameters among the per-layer values, because these get no gradient."""

        def inputs_per_layer(*args):
            return call_at_layers(run(*args), lambda layers, x, per_layer: per_layer)

        reads = Traced(inputs_per_layer, params, model_state, batch).reads()[0] if jax.tree.leaves(per_layer) else {}
        for path in self.layout.placements:
            if reads and pick(reads, tuple(path.split("/"))):
                raise refuse(
                    f"{self.layout.blueprint.name} gives its layers {path} one by one, in jp.pipelined(layers, x, ...)",
                    rule="what each layer has of its own there is no parameter: it gets no gradient",
                    fix="stack it with the other parameters of the layers",
                )

    def _check_enclosed(self, eqns: Sequence[JaxprEqn], paths: Mapping[Var, str]) -> None:
        """Refuses layers that close over values computed from parameters outside of the layers.

        Args:
          eqns: Equations that compute the layers' output from their input and from parameters.
          paths: Maps variables of all parameters to paths.
        """
        name = self.layout.blueprint.name
        stacked = {var: path for var, path in paths.items() if path in self.layout.stacked_paths}
        check_one_pass(name, eqns, stacked)
        check_layerwise(name, eqns, stacked)
        reads = variables(var for eqn in eqns for var in eqn.invars)
        read_paths = {path for var, path in paths.items() if var in reads}
        inner = [path for path in self.layout.placements if path in read_paths]
        if inner and all(path in self.shardings.shared_keys for path in inner):
            words = zip(*self.shardings.stacked_keys.values(), strict=False)
            stack = "/".join(keys[0] for keys in takewhile(lambda keys: len({*keys}) == 1, words))
            raise refuse(
                f"{name} gives jp.pipelined layers that read {inner[0]}, and its largest stack of layers is {stack}",
                rule="a pipeline spreads the largest stack of layers over its stages; what is before it runs on the "
                "first stage, and what is after it on the last",
                fix=f"jp.pipelined(layers, x) around the layers of {stack}",
            )
        for path in inner:
            if path in self.shardings.shared_keys:
                raise refuse(
                    f"{name} reads {path} inside of its layers, or what follows from it",
                    rule="layers read the parameters stacked for them and what jp.pipelined(layers, x, ...) is given: "
                    "a stage has nothing else",
                    fix="pass it through x: jp.pipelined(layers, (x, it)), whose layers return it too",
                )


def salt_by_replica(model_states: Tree, replica: jax.Array, replicas: int) -> Tree:
    """Folds the replica's index into random keys, so that replicas use different keys for their different examples."""
    return model_states if replicas == 1 else fold_in_number(model_states, replica)
