"""One training step: one compiled program.

    batch ─► microbatches ─► loss sums, gradients ─► accumulated ─► divided once ─► optimizer ─► state
                 └──────────────── scan ─────────────────┘

The specs of the layout say where each piece lives; XLA compiles the collectives.
"""

import dataclasses
import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxpar.errors import nearest, refuse, users_code
from jaxpar.inspector.subject import Subject
from jaxpar.mesh.axes import BATCH_AXES
from jaxpar.mesh.devices import is_simulated
from jaxpar.models.remat import POLICIES, remat
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import Compute, Tree, path_of
from jaxpar.sharding.tracing import uncollected
from jaxpar.train import precision as check
from jaxpar.train import state as states
from jaxpar.train.faults import guarded
from jaxpar.train.losses import Sums, as_sums
from jaxpar.train.pipelined import Pipelined
from jaxpar.train.state import State
from jaxpar.train.subject import subject
from jaxpar.train.updating import Updating

Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], Any]
PRECISIONS = {"fp32": None, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """How a step computes, which changes its speed and memory and not what it means.

    Attributes:
      accumulate: Microbatches per step; their gradients are summed before the update.
      precision: `fp32`, or `bf16`: products in bfloat16, parameters and optimizer in float32.
      remat: What the backward pass keeps, one of `jaxpar.models.remat.POLICIES`.
      offload: Keep the optimizer state in host memory between steps.
    """

    accumulate: int = 1
    precision: str = "fp32"
    remat: str = "none"
    offload: bool = False

    def __post_init__(self):
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise refuse(f"accumulate={self.accumulate!r}", rule="a positive whole number", fix="accumulate=1")
        for key, known in (("precision", PRECISIONS), ("remat", POLICIES)):
            if not isinstance(getattr(self, key), str) or getattr(self, key) not in known:
                raise refuse(
                    f"{key}={getattr(self, key)!r}",
                    rule=f"{key} is one of {', '.join(known)}",
                    fix=nearest(str(getattr(self, key)), known),
                )


class Step:
    """A compiled training step: `state, metrics = step(state, batch)`.

    Compiled once per shape of batch, at the first call. The state that goes in is given up.

    Attributes:
      layout: Where arrays live.
      products: After the first call with bf16, what the matrix products really run in.
      agree: With several processes, what each says of a program before it is run: (which, hash).
    """

    def __init__(
        self,
        layout: Layout,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        numerics: Numerics,
        *,
        guard: bool = False,
    ):
        self.layout, self.loss, self.optimizer, self.numerics = layout, loss, optimizer, numerics
        self.products: check.Products | None = None
        self.agree: Callable[[str, str], None] | None = None
        self.pipelined = None
        if isinstance(layout, Layout) and layout.sizes["pipe"] > 1:
            if numerics.accumulate > 1:
                raise refuse(
                    f"accumulate={numerics.accumulate} with pipe={layout.sizes['pipe']}",
                    rule="a pipeline accumulates over its microbatches",
                    fix=f"accumulate=1 and microbatches={numerics.accumulate * layout.microbatches}",
                )
            kind = Pipelined if layout.parallel.pipeline.weights == "flush" else Updating
            self.pipelined = kind(layout, loss, numerics, PRECISIONS[numerics.precision])
        self.placed = states.shardings(layout, states.abstract(layout, optimizer), offload=numerics.offload)
        self._compiled: dict[Any, Any] = {}
        # simulated devices share one pool of threads; some dozens of unfinished steps fill it and deadlock
        self._flying: deque = deque()
        self._most = 8 if layout.mesh is not None and is_simulated(layout.mesh.devices.flat) else None
        self.guard, update = guard, self._update
        if guard:
            update = guarded(update, self._on_device, look_at_params=isinstance(self.pipelined, Updating))
        self._train = jax.jit(update, donate_argnums=0, out_shardings=(self.placed, None))
        self._eval = jax.jit(self._measure)

    def __call__(self, state: State, batch: Batch, *, limit: float = math.inf) -> tuple[State, dict[str, jax.Array]]:
        """Makes one update.

        Args:
          state: As made by `create` or by the step before; its buffers are reused.
          batch: Name to array; every array's first dim is the global batch.
          limit: The loss above which a step that guards makes no update; others do not read it.

        Returns:
          The new state, and scalars: each entry of the loss function divided by its count,
          `tokens` (the count of `loss`) and `grad_norm` (global, before clipping); `skipped`
          where the step guards.
        """
        _check_given(state)
        batch = self.put(batch)
        key = _signature("train", batch)
        if key not in self._compiled:
            self._check_state(state)
            self._compiled[key] = self._compile(key, self.lower(state, batch))
        limits = (np.float32(limit),) if self.guard else ()
        new, metrics = self._run(key, state, state, batch, *limits)
        self._bound(metrics)
        return new, metrics

    def _bound(self, result: Any) -> None:
        """Waits, on simulated devices, until at most eight programs are unfinished."""
        if self._most is not None:
            self._flying.append(result)
            if len(self._flying) > self._most:
                jax.block_until_ready(self._flying.popleft())

    def evaluate(self, state: State, batch: Batch) -> Sums:
        """Returns the sums and counts of one batch, without dropout and without an update."""
        _check_given(state)
        batch = self.put(batch)
        key = _signature("eval", batch)
        if key not in self._compiled:
            self._check_state(state)
            with self._users_code(batch), self._traced():
                lowered = self._eval.lower(state.params, state.rest, batch)
            self._compiled[key] = self._compile(key, lowered)
        sums = self._run(key, state, state.params, state.rest, batch)
        self._bound(sums)
        return sums

    def _compile(self, key: Any, lowered):
        """Compiles a program that all processes agree on: others would wait in it for ever."""
        if self.agree is not None:
            self.agree(
                f"{key[0]} program ({len(self._compiled)})", hashlib.sha256(lowered.as_text().encode()).hexdigest()
            )
        return lowered.compile()

    def _run(self, key: Any, state: State, *args: Any) -> Any:
        try:
            return self._compiled[key](*args)
        except (TypeError, ValueError, RuntimeError):
            self._check_state(state)  # looked at only where JAX refuses, so that a good step costs nothing
            raise

    def _check_state(self, state: State) -> None:
        """Refuses a state of another layout, model or optimizer."""
        fix = "state = jp.create(layout, optimizer), then state, metrics = step(state, batch)"
        expected = states.abstract(self.layout, self.optimizer)
        for part, whose in (("params", "model"), ("optimizer", "optimizer"), ("rest", "model")):
            given, wanted = getattr(state, part), getattr(expected, part)
            if jax.tree.structure(given) != jax.tree.structure(wanted):
                raise refuse(
                    f"a state of another {whose}: its tree of {part} is another",
                    rule=f"state and step have the same {whose}",
                    fix=fix,
                )
            flat = zip(
                jax.tree_util.tree_leaves_with_path(given),
                jax.tree.leaves(wanted),
                jax.tree.leaves(getattr(self.placed, part)),
                strict=True,
            )
            for (keys, leaf), want, place in flat:
                path = f"{part}/{path_of(keys)}"
                if not isinstance(leaf, jax.Array):
                    raise refuse(
                        f"{path} of the state is a {type(leaf).__name__}",
                        rule="a state lives on the devices of its layout",
                        fix=fix,
                    )
                if leaf.shape != want.shape:
                    raise refuse(
                        f"{path} of the state is {list(leaf.shape)}, the step's is {list(want.shape)}",
                        rule=f"state and step have the same {whose}",
                        fix=fix,
                    )
                if not leaf.sharding.is_equivalent_to(place, leaf.ndim):
                    raise refuse(
                        f"a state of another layout: {path} is on {leaf.sharding}, the step wants {place}"[:300],
                        rule="state and step have the same layout, and the same offload",
                        fix=fix,
                    )

    def _users_code(self, batch: Batch):
        shapes = ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in batch.items())
        return users_code(
            f"{self.layout.blueprint.name} and its loss on {shapes}",
            rule="model, loss and optimizer accept the batch",
            fix="the line of the model or the loss that this names",
        )

    def lower(self, state: State, batch: Batch):
        """Returns the step lowered for these shapes, as `jax.jit(...).lower` does, and checks its precision."""
        batch = {name: self.shaped(name, value) for name, value in batch.items()}
        with self._users_code(batch), self._traced() as named:
            lowered = self._train.lower(state, batch, *((np.float32(math.inf),) if self.guard else ()))
        self._check_sequence(named)
        if self.numerics.precision == "bf16":
            self.products = check.products(lowered.as_text())
            check.check_bf16(self.products)
        return lowered

    def abstract(self) -> State:
        """Returns the state as shapes, dtypes and shardings: what `lower` needs, where no device holds one."""
        shapes = states.abstract(self.layout, self.optimizer)
        return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, self.placed)

    def subject(self, batch: Batch) -> Subject:
        """Returns this step, lowered for such a batch, as `jp.inspect` wants it; nothing is run."""
        return subject(self, batch)

    def put(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the batch on its devices; arrays that are there already are left alone.

        Raises:
          JaxparError: If an entry is no array of numbers, or its first dim does not split.
        """
        if not isinstance(batch, Mapping) or not batch:
            raise refuse(
                f"a batch that is {batch!r:.60}",
                rule="a batch is a dict of arrays",
                fix='{"inputs": ..., "targets": ...}',
            )
        return {name: self._put(name, value) for name, value in batch.items()}

    def _put(self, name: str, value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and len(value.sharding.device_set) == self.layout.devices:
            return value
        try:
            value = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise refuse(
                f"{name} in the batch: {error}",
                rule="a batch is a dict of arrays",
                fix=f"np.stack rows of one shape, or leave {name!r} out",
            ) from error
        if value.dtype.kind not in "biuf" and value.dtype != jnp.bfloat16:
            raise refuse(
                f"{name} in the batch has dtype {value.dtype}",
                rule="a batch holds numbers",
                fix=f"leave {name!r} out, or encode it",
            )
        self._check_rows(name, value)
        sharding = self.layout.sharding(self.layout.batch_spec(value.shape))
        if jax.process_count() == 1:
            return jax.device_put(value, sharding)
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])  # what is here of it

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the shape of a batch array with the sharding that it will have."""
        if isinstance(value, jax.Array) or isinstance(getattr(value, "sharding", None), NamedSharding):
            return value
        self._check_rows(name, value)
        placed = self.layout.sharding(self.layout.batch_spec(value.shape))
        return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype), sharding=placed)

    def _check_sequence(self, named: set[str]) -> None:
        """Says so where sequence parallelism has too few names to be one."""
        inner = {name for name, axes in self.layout.names.items() if axes and "tensor" in axes} - {"seq"}
        missing = [what for what, names in (("seq", {"seq"}), ("heads or mlp", inner)) if not named & names]
        if self.layout.parallel.sequence and missing:
            warnings.warn(
                f"sequence=True, but {self.layout.blueprint.name} names no activation dim {' and none '.join(missing)}:"
                " the tokens are split, and XLA may gather weights where it should gather activations. Name them: "
                'jp.constrain(x, "batch", "seq", "embed") on the stream, (..., "mlp") and (..., "heads", None) inside.',
                stacklevel=4,
            )

    def _check_rows(self, name: str, value: Any) -> None:
        ways = self.layout.replicas * self.numerics.accumulate * self.layout.microbatches
        rows = value.shape[0] if value.shape else 0
        if not rows or rows % ways:
            factors = {axis: self.layout.sizes[axis] for axis in BATCH_AXES}
            factors |= {"accumulate": self.numerics.accumulate, "microbatches": self.layout.microbatches}
            shown = " x ".join(f"{axis}={size}" for axis, size in factors.items() if size > 1) or "one device"
            raise refuse(
                f"{name} {list(value.shape)} in the batch has {rows} examples; {shown} needs a multiple of {ways}",
                rule="data x fsdp x accumulate (or microbatches of a pipeline) divides the global batch, the first dim "
                "of every array",
                fix=f"a global batch of {max(1, round(rows / ways)) * ways}",
            )

    @contextmanager
    def _traced(self):
        names = activation_names(self.layout.names, self.layout.sizes)
        with jax.set_mesh(self.layout.on), uncollected(), names as named:
            yield named

    def _forward(self, params: Tree, rest: Tree, batch: Batch, *, train: bool) -> tuple[Sums, Tree]:
        dtype = PRECISIONS[self.numerics.precision]
        compute = Compute(train=train, dtype=dtype, remat=self.numerics.remat)
        blueprint = self.layout.blueprint
        model = blueprint.bind(params, rest, lambda path, value: self.layout.use(path, value, dtype), compute)
        sums = as_sums(self.loss(model, batch), accumulate=self.numerics.accumulate)
        return sums, blueprint.collect(model)

    def _gradients(self, params: Tree, rest: Tree, batch: Batch, specs: Tree, *, mean: bool):
        """Returns (gradients of the loss sum or mean, sums, rest) of one microbatch, gradients placed by `specs`."""

        def objective(params):
            sums, after = self._forward(params, rest, batch, train=True)
            total, count = sums["loss"]
            return (total / jax.lax.stop_gradient(count) if mean else total), (sums, after)

        if not self.layout.blueprint.takes_remat:
            objective = remat(objective, self.numerics.remat)
        gradients, (sums, after) = jax.grad(objective, has_aux=True)(params)
        return self._constrain(gradients, specs), sums, after

    def _accumulated(self, params: Tree, rest: Tree, batch: Batch):
        """Returns gradients of the mean loss over all microbatches, the sums, and the rest."""
        if self.pipelined is not None:
            return self.pipelined.gradients(params, rest, batch)
        count = self.numerics.accumulate
        if count == 1:  # no accumulator to keep whole, so stage 1 too can take a reduce-scatter for an all-reduce
            return self._gradients(params, rest, batch, self.layout.updated, mean=True)
        # rows i, i + count, ... make microbatch i: each device splits its own rows, nothing moves
        micro = {
            name: jnp.moveaxis(value.reshape(value.shape[0] // count, count, *value.shape[1:]), 1, 0)
            for name, value in batch.items()
        }

        def body(carry, batch):
            gradients, sums, rest = carry
            more, new, rest = self._gradients(params, rest, batch, self.layout.gradients, mean=False)
            gradients = self._constrain(jax.tree.map(jnp.add, gradients, more), self.layout.gradients)
            return (gradients, jax.tree.map(jnp.add, sums, new), rest), None

        first = jax.tree.map(lambda value: value[0], micro)
        shapes = jax.eval_shape(partial(self._gradients, specs=self.layout.gradients, mean=False), params, rest, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:2])
        zeros = (self._constrain(zeros[0], self.layout.gradients), zeros[1])
        (gradients, sums, rest), _ = jax.lax.scan(body, (*zeros, rest), micro)
        tokens = sums["loss"][1]
        return jax.tree.map(lambda gradient: gradient / tokens.astype(gradient.dtype), gradients), sums, rest

    def _update(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        if isinstance(self.pipelined, Updating):
            params, optimizer, sums, rest, norm = self.pipelined.updated(
                self.optimizer, state.params, self._on_device(state.optimizer), state.rest, batch
            )
            return State(state.step + 1, params, optimizer, rest), _metrics(sums, norm)
        gradients, sums, rest = self._accumulated(state.params, state.rest, batch)
        params = state.params
        if self.layout.parallel.stage in (1, 2):  # the optimizer works on a shard of what is whole
            gradients = self._constrain(gradients, self.layout.updated)
            params = self._constrain(params, self.layout.updated)
        updates, optimizer = self.optimizer.update(gradients, self._on_device(state.optimizer), params)
        params = optax.apply_updates(params, updates)
        return State(state.step + 1, params, optimizer, rest), _metrics(sums, optax.tree.norm(gradients))

    def _on_device(self, optimizer: Any) -> Any:
        if not self.numerics.offload:
            return optimizer
        return jax.tree.map(
            lambda x, on: jax.device_put(x, on.with_memory_kind("device")), optimizer, self.placed.optimizer
        )

    def _measure(self, params: Tree, rest: Tree, batch: Batch) -> Sums:
        if self.pipelined is not None:
            return self.pipelined.evaluate(params, rest, batch)
        return self._forward(params, rest, batch, train=False)[0]

    def _constrain(self, tree: Tree, specs: Tree) -> Tree:
        if self.layout.parallel.stage == 0 and self.layout.sizes["tensor"] == 1:
            return tree
        return jax.tree.map(
            lambda x, spec: jax.lax.with_sharding_constraint(x, self.layout.sharding(spec)), tree, specs
        )


def _metrics(sums: Sums, norm: jax.Array) -> dict[str, jax.Array]:
    metrics = {name: total / count for name, (total, count) in sums.items()}
    return metrics | {"tokens": sums["loss"][1], "grad_norm": norm}


def _check_given(state: Any) -> None:
    """Refuses what is no state, or was given up; jax 0.10.2 ends the process where a program gets a deleted array."""
    if not isinstance(state, State):
        raise refuse(
            f"a state that is a {type(state).__name__}",
            rule="a state comes from jp.create, or from the step before",
            fix="state = jp.create(layout, optimizer), then state, metrics = step(state, batch)",
        )
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise refuse(
            "a state that an earlier step took over",
            rule="a step reuses the memory of the state it is given",
            fix="state, metrics = step(state, batch), and only the new state after that",
        )


def _signature(kind: str, batch: Batch):
    return kind, tuple(
        sorted(
            ((str(name), value.shape, str(value.dtype), value.sharding) for name, value in batch.items()),
            key=lambda entry: entry[0],
        )
    )


def build(
    layout: Layout, loss: Loss, optimizer: optax.GradientTransformation, *, guard: bool = False, **numerics: Any
) -> Step:
    """Returns the training step of a layout.

    Args:
      layout: As made by `compose`.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      optimizer: The optax chain that `create` was given.
      guard: Whether a step whose loss or gradients are not finite, or whose loss is above a limit, changes nothing.
      **numerics: `accumulate`, `precision`, `remat`, `offload`: see `Numerics`.

    Raises:
      JaxparError: If a setting has no such value.
    """
    known = [field.name for field in dataclasses.fields(Numerics)]
    for key in numerics:
        if key not in known:
            raise refuse(
                f"{key}={numerics[key]!r:.60}", rule=f"a step takes {', '.join(known)}", fix=nearest(key, known)
            )
    if not callable(loss):
        raise refuse(
            f"loss={loss!r:.60}",
            rule="a loss is a function of (model, batch)",
            fix="jp.next_token, or lambda model, batch: (jnp.sum(losses), losses.size)",
        )
    return Step(layout, loss, optimizer, Numerics(**numerics), guard=guard)
