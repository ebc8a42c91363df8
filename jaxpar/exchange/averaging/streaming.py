"""Streaming DiLoCo: synchronizes one fragment of the model at a time, and applies it some steps after sending it.

    step      1 2 3 4 5 6 7 8 9      every 6, fragments 3, delay 1
    sends       0   1   2   0
    applies       0   1   2   0      so a step sends one fragment only

A replica sends its parameter change since the fragment's last sync round, in fp32 or as a code of fewer bits. If each
step is a program, the delay changes the results but hides no traffic: a step waits for its own collectives. With
`depart` and `arrive` several steps are one program, and the all-reduce overlaps with them: see
`step/per_replica/streaming_rounds.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import check_ranges, refuse, suggest
from jaxpar.exchange.averaging.fragments import ALL, Fragment, fragments, put, share, take
from jaxpar.exchange.averaging.local import OuterOptimizer, outer_step
from jaxpar.exchange.base import SECTION, STEPS, Replicas, Tree, flatten_by_path
from jaxpar.exchange.compressed.base import Compressed
from jaxpar.exchange.compressed.quantization import BFloat16, Qsgd
from jaxpar.mesh.collective import Traffic

if TYPE_CHECKING:
    from jaxpar.exchange.replica_mesh import ReplicaMesh

CODES: Mapping[str, Compressed] = {"bf16": BFloat16(), "int8": Qsgd(bits=8), "int4": Qsgd(bits=4)}


@dataclass(frozen=True, kw_only=True)
class Streaming(OuterOptimizer):
    """Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512).

    With one fragment, no delay and a blend of 0 it is `diloco`.

    Attributes:
      name: streaming (DiLoCo of one fragment of the model at a time, applied some steps after it was sent).
      every: Steps from one sync round of a fragment to its next.
      fragments: Number of fragments, which synchronize one after the other; it divides `every`.
      order: depth (a fragment is a range of layers) or strided (a fragment is every n-th layer).
      delay: Steps between the mean of a fragment and its application.
      blend: Weight of a replica's own parameters when a fragment is applied; 0 replaces them.
      wire: Format of a replica's parameter change on the wire: fp32, bf16, int8 or int4; the last two are rounded at
        random, in blocks with a scale, as by `qsgd` (the paper's 4 bits are floats, E3M0). Norms, biases and parameters
        of fewer than 4,096 elements are sent in fp32.
      lr: The outer optimizer's learning rate.
      momentum: The outer momentum; 0 for none.
      nesterov: Whether the outer momentum is Nesterov's.
      outer: In Python, an optax chain that replaces these three settings.
    """

    name: str = "streaming"
    every: int = 20
    fragments: int = 4
    order: Literal["depth", "strided"] = "strided"
    delay: int = 0
    blend: float = 0.0
    wire: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    replicas_differ = True
    global_model = "anchor"

    def __post_init__(self):
        check_ranges(
            self,
            SECTION,
            {"every": (1, STEPS), "fragments": (1, STEPS), "delay": (0, STEPS), "blend": (0.0, 1.0)},
            below=("blend",),
        )
        self.check()
        if self.wire not in ("fp32", *CODES):
            rule = f"a replica's parameter change is sent in fp32, {', '.join(CODES)}"
            raise refuse(f"{SECTION}.wire = {self.wire!r}", rule=rule, fix=suggest(str(self.wire), ["fp32", *CODES]))
        if self.every % self.fragments:
            fits = max(count for count in range(1, self.fragments) if self.every % count == 0)
            raise refuse(
                f"{SECTION}.fragments = {self.fragments} with every = {self.every}",
                rule="fragments synchronize at equal distances: their number divides `every`",
                fix=f"fragments = {fits}",
            )
        if self.delay >= self.every:
            raise refuse(
                f"{SECTION}.delay = {self.delay} with every = {self.every}",
                rule="a fragment is applied before it is sent again: delay is below `every`",
                fix=f"delay = {self.every - 1}",
            )

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the anchor, the outer optimizer's state, and the fragments that are sent but not yet applied.

        Arrays of the outer optimizer that are not per parameter, such as a step count, get one entry per fragment.
        Shape [fragments, ...].
        """
        import jax
        import jax.numpy as jnp

        flat, _ = flatten_by_path(params)
        covers, outer = _is_per_parameter(flat), self.chain.init(flat)
        outer = jax.tree.map(lambda x: x if covers(x) else jnp.stack([x] * self.fragments), outer, is_leaf=covers)
        code = CODES[self.wire].init(flat, replicas) if self.wire in CODES else {}
        return {"anchor": flat, "outer": outer, "sent": flat, "code": code}

    def sync_round(self, step: int) -> int:
        """Returns the step's position in the period, from 1, if it sends or applies a fragment, else 0.

        Before the first fragment arrives, `every` is added to it: these steps only send.
        """
        place = (step - 1) % self.every
        arrival = _fragment_number(self, place - self.delay)
        if arrival is not None and step <= self.delay:  # nothing was sent yet
            arrival = None
            place += self.every
        return place + 1 if _fragment_number(self, place % self.every) is not None or arrival is not None else 0

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Sends a fragment, applies an earlier one, or both."""
        params, structure = flatten_by_path(replicas.params)
        between = between.with_specs(dict(zip(params, structure.flatten_up_to(between.specs), strict=True)))
        state = dict(replicas.exchange_state)
        all_fragments = fragments(between.parts, self.fragments, self.order)
        warmup, place = divmod(between.sync_round - 1, self.every)
        if (number := _fragment_number(self, place)) is not None:
            fragment = all_fragments[number]
            mean, state["code"] = self._mean(fragment, params, state, _mesh_of_fragment(between, fragment))
            state["sent"] = put(state["sent"], fragment, mean)
        if not warmup and (number := _fragment_number(self, place - self.delay)) is not None:
            params, state = self._apply(number, all_fragments[number], params, state, between)
        return replace(replicas, params=structure.unflatten(params.values()), exchange_state=state)

    def depart(self, replicas: Replicas, between: "ReplicaMesh") -> Tree:
        """Starts the all-reduce of a sync round's fragment, in fp32 only: see `in_flight`."""
        from jaxpar.exchange.averaging import in_flight

        flat, _, fragment, between = self._select_fragment(replicas, between, between.sync_round)
        return in_flight.depart(take(flat, fragment, dim=1), _mesh_of_fragment(between, fragment))

    def arrive(self, vectors: Tree, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Applies the fragment that departed `delay` steps before."""
        from jaxpar.exchange.averaging import in_flight

        flat, number, fragment, between = self._select_fragment(replicas, between, between.sync_round - self.delay)
        largest = max(flat, key=lambda path: flat[path].size)  # as updated by the steps in between
        narrowed = _mesh_of_fragment(between, fragment)
        mean = in_flight.arrive(vectors, narrowed.parts, narrowed, flat[largest])
        state = {**replicas.exchange_state, "sent": put(replicas.exchange_state["sent"], fragment, mean)}
        flat, state = self._apply(number, fragment, flat, state, between)
        _, structure = flatten_by_path(replicas.params)
        return replace(replicas, params=structure.unflatten(flat.values()), exchange_state=state)

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce per fragment, or the traffic of its code."""
        from jaxpar.exchange.replica_mesh import mean_traffic

        predict = CODES[self.wire].traffic if self.wire in CODES else mean_traffic
        several = len(shards) > 1  # a plan passes all parameters as one array
        all_fragments = fragments(shards, self.fragments, self.order) if several else [dict.fromkeys(shards, ALL)]
        traffic = []
        for number, fragment in enumerate(all_fragments):
            shards_in = {path: share(shards[path], layers) for path, layers in fragment.items()}
            traffic += [
                replace(message, sync_round=number + 1, every=self.every) for message in predict(shards_in, replicas)
            ]
        return tuple(traffic)

    def _select_fragment(
        self, replicas: Replicas, between: "ReplicaMesh", sync_round: int
    ) -> tuple[Tree, int, Fragment, "ReplicaMesh"]:
        """Returns parameters by path, the number and layers of a sync round's fragment, and `between` by path."""
        flat, structure = flatten_by_path(replicas.params)
        between = between.with_specs(dict(zip(flat, structure.flatten_up_to(between.specs), strict=True)))
        number = _fragment_number(self, (sync_round - 1) % self.every)
        if number is None:
            rule = "a fragment departs in a sync round that sends one"
            raise refuse(
                f"sync round {sync_round} of {self}", rule=rule, fix="the number of a sync round that sends one"
            )
        return flat, number, fragments(between.parts, self.fragments, self.order)[number], between

    def _mean(self, fragment: Fragment, params: Tree, state: Tree, between: "ReplicaMesh") -> tuple[Tree, Tree]:
        """Returns the decoded mean of a fragment over replicas, and the new state of the code."""
        import jax
        import jax.numpy as jnp

        local = take(params, fragment, dim=1)
        if self.wire not in CODES:
            return between.mean(local), state["code"]
        anchor = take(state["anchor"], fragment)
        changes = jax.tree.map(jnp.subtract, between.spread(anchor), local)
        mean_change, code = CODES[self.wire].gradients(changes, state["code"], between)
        return jax.tree.map(jnp.subtract, anchor, mean_change), code

    def _apply(
        self, number: int, fragment: Fragment, params: Tree, state: Tree, between: "ReplicaMesh"
    ) -> tuple[Tree, Tree]:
        """Applies the outer optimizer's step on a fragment; returns the parameters and the exchange's state."""
        import jax

        covers = _is_per_parameter(state["anchor"])
        opt_state = jax.tree.map(
            lambda x: take(x, fragment) if covers(x) else x[number], state["outer"], is_leaf=covers
        )
        anchor, opt_state = outer_step(
            self.chain, take(state["anchor"], fragment), take(state["sent"], fragment), opt_state
        )
        put_back = lambda x, y: put(x, fragment, y) if covers(x) else x.at[number].set(y)  # noqa: E731
        outer = jax.tree.map(put_back, state["outer"], opt_state, is_leaf=covers)
        spread = _mesh_of_fragment(between, fragment).spread(anchor)
        blend = jax.tree.map(lambda w, a: self.blend * w + (1 - self.blend) * a, take(params, fragment, dim=1), spread)
        return put(params, fragment, blend, dim=1), {
            **state, "anchor": put(state["anchor"], fragment, anchor), "outer": outer,
        }  # fmt: skip


def _fragment_number(method: Streaming, place: int) -> int | None:
    """Returns the number of the fragment that step `place` of the period (from 0) sends, or None."""
    distance = method.every // method.fragments
    number, remainder = divmod(place % method.every + 1, distance)
    return None if remainder else number - 1


def _is_per_parameter(flat: Mapping[str, object]) -> Callable[[Any], bool]:
    """Returns a predicate: whether a tree is a dict with exactly one array per parameter."""
    paths = flat.keys()
    return lambda tree: isinstance(tree, dict) and tree.keys() == paths


def _mesh_of_fragment(between: "ReplicaMesh", fragment: Fragment) -> "ReplicaMesh":
    parts = {path: share(between.parts[path], layers) for path, layers in fragment.items()}
    return replace(between, specs={path: between.specs[path] for path in fragment}, parts=parts)
