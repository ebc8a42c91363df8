"""Streaming DiLoCo: a fragment of the model at a time, applied some steps after it was sent.

    step      1 2 3 4 5 6 7 8 9      every 6, fragments 3, delay 1
    sends       0   1   2   0
    applies       0   1   2   0      so that what is sent in a step is of one fragment

What is sent is the way that a replica has gone since the fragment's last meeting: whole, or as a code of fewer bits.
Where one program makes one step, the delay is in what is computed, not in time: a step waits for what it sends. By
`depart` and `arrive` the steps between them are one program, in which nothing waits (`step.apart.rounds`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.errors import check_ranges, nearest, refuse
from jaxpar.exchange.averaging.diloco import Outer, stepped
from jaxpar.exchange.averaging.fragments import ALL, Fragment, fragments, put, share, take
from jaxpar.exchange.base import Replicas, Tree, by_path
from jaxpar.exchange.compressed.base import Compressed
from jaxpar.exchange.compressed.bfloat16 import BFloat16
from jaxpar.exchange.compressed.qsgd import Qsgd
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import SECTION, STEPS

if TYPE_CHECKING:
    from jaxpar.exchange.between import Between

CODES: Mapping[str, Compressed] = {"bf16": BFloat16(), "int8": Qsgd(bits=8), "int4": Qsgd(bits=4)}


@dataclass(frozen=True, kw_only=True)
class Streaming(Outer):
    """Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512).

    With one fragment, no delay and a blend of 0 it is `diloco`.

    Attributes:
      name: streaming (DiLoCo of one fragment of the model at a time, applied some steps after it was sent).
      every: Steps from one meeting of a fragment to its next.
      fragments: Into how many the model is divided; they meet one after the other. Divides `every`.
      order: depth (layers in a row are a fragment), or strided (every so many layers).
      delay: Steps from when a fragment's mean is taken to when it is applied.
      blend: Of a replica's own parameters, how much it keeps when the fragment's are applied.
      wire: In what a replica's way travels: fp32, bf16, int8 or int4, of which the last two are rounded at random, in
        blocks with a scale, as by `qsgd` (the paper's 4 bits are floats, E3M0). Norms, biases and what has fewer than
        4,096 elements travel in fp32.
      lr: The outer optimizer's learning rate.
      momentum: Its momentum; 0 for none.
      nesterov: Whether its momentum is Nesterov's.
      outer: In Python, any optax chain in place of these three.
    """

    name: str = "streaming"
    every: int = 20
    fragments: int = 4
    order: Literal["depth", "strided"] = "strided"
    delay: int = 0
    blend: float = 0.0
    wire: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    differ = True
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
            rule = f"the way of a replica travels in fp32, {', '.join(CODES)}"
            raise refuse(f"{SECTION}.wire = {self.wire!r}", rule=rule, fix=nearest(str(self.wire), ["fp32", *CODES]))
        if self.every % self.fragments:
            fits = max(count for count in range(1, self.fragments) if self.every % count == 0)
            raise refuse(
                f"{SECTION}.fragments = {self.fragments} with every = {self.every}",
                rule="fragments meet at equal distances: their number divides `every`",
                fix=f"fragments = {fits}",
            )
        if self.delay >= self.every:
            raise refuse(
                f"{SECTION}.delay = {self.delay} with every = {self.every}",
                rule="a fragment is applied before it is sent again: delay is below `every`",
                fix=f"delay = {self.every - 1}",
            )

    def init(self, params: Tree, replicas: int) -> Tree:
        """Returns the anchor, the outer optimizer's state, and what was sent and not applied yet.

        What the outer optimizer keeps in another shape than that of the parameters, such as a count of its steps, each
        fragment has for itself. Shape [fragments, ...].
        """
        import jax
        import jax.numpy as jnp

        flat, _ = by_path(params)
        part, outer = _is_of(flat), self.chain.init(flat)
        outer = jax.tree.map(lambda x: x if part(x) else jnp.stack([x] * self.fragments), outer, is_leaf=part)
        code = CODES[self.wire].init(flat, replicas) if self.wire in CODES else {}
        return {"anchor": flat, "outer": outer, "sent": flat, "code": code}

    def meeting(self, step: int) -> int:
        """Returns the step's place in the period, where something is sent or applied then; other numbers at first."""
        place = (step - 1) % self.every
        applied = self._at(place - self.delay)
        if applied is not None and step <= self.delay:  # of what no one has sent yet
            applied = None
            place += self.every
        return place + 1 if self._at(place % self.every) is not None or applied is not None else 0

    def agree(self, replicas: Replicas, between: "Between") -> Replicas:
        """Returns the replicas after a fragment was sent, or applied, or both."""
        params, structure = by_path(replicas.params)
        between = between.of(dict(zip(params, structure.flatten_up_to(between.specs), strict=True)))
        own = dict(replicas.own)
        each = fragments(between.parts, self.fragments, self.order)
        first, place = divmod(between.meeting - 1, self.every)
        if (number := self._at(place)) is not None:
            fragment = each[number]
            mean, own["code"] = self._mean(fragment, params, own, _only(between, fragment))
            own["sent"] = put(own["sent"], fragment, mean)
        if not first and (number := self._at(place - self.delay)) is not None:
            params, own = self._apply(number, each[number], params, own, between)
        return replace(replicas, params=structure.unflatten(params.values()), own=own)

    def depart(self, replicas: Replicas, between: "Between") -> Tree:
        """Returns the fragment that is sent at a meeting, on its way: see `in_flight`. Only in fp32."""
        from jaxpar.exchange.averaging import in_flight

        flat, _, fragment, between = self._sent(replicas, between, between.meeting)
        return in_flight.depart(take(flat, fragment, dim=1), _only(between, fragment))

    def arrive(self, vectors: Tree, replicas: Replicas, between: "Between") -> Replicas:
        """Returns the replicas after a fragment that has departed was applied, at the meeting `delay` steps later."""
        from jaxpar.exchange.averaging import in_flight

        flat, number, fragment, between = self._sent(replicas, between, between.meeting - self.delay)
        largest = max(flat, key=lambda path: flat[path].size)  # of after the steps that do not wait
        only = _only(between, fragment)
        mean = in_flight.arrive(vectors, only.parts, only, flat[largest])
        own = {**replicas.own, "sent": put(replicas.own["sent"], fragment, mean)}
        flat, own = self._apply(number, fragment, flat, own, between)
        _, structure = by_path(replicas.params)
        return replace(replicas, params=structure.unflatten(flat.values()), own=own)

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns the all-reduce of each fragment, or what its code sends."""
        from jaxpar.exchange.between import averaged

        sent_by = CODES[self.wire].sends if self.wire in CODES else averaged
        several = len(shards) > 1  # a plan asks about all parameters as one array
        each = fragments(shards, self.fragments, self.order) if several else [dict.fromkeys(shards, ALL)]
        found = []
        for number, fragment in enumerate(each):
            own = {path: share(shards[path], layers) for path, layers in fragment.items()}
            found += [replace(sent, meeting=number + 1, every=self.every) for sent in sent_by(own, replicas)]
        return tuple(found)

    def _sent(self, replicas: Replicas, between: "Between", meeting: int) -> tuple[Tree, int, Fragment, "Between"]:
        """Returns parameters by path, number and fragment that is sent at a meeting, and where parameters are."""
        flat, structure = by_path(replicas.params)
        between = between.of(dict(zip(flat, structure.flatten_up_to(between.specs), strict=True)))
        number = self._at((meeting - 1) % self.every)
        if number is None:
            rule = "a fragment departs where it is sent"
            raise refuse(f"meeting {meeting} of {self}", rule=rule, fix="a meeting that sends one")
        return flat, number, fragments(between.parts, self.fragments, self.order)[number], between

    def _mean(self, fragment: Fragment, params: Tree, own: Tree, between: "Between") -> tuple[Tree, Tree]:
        """Returns the replicas' mean of a fragment as it comes off the wire, and the state of its code."""
        import jax
        import jax.numpy as jnp

        each = take(params, fragment, dim=1)
        if self.wire not in CODES:
            return between.mean(each), own["code"]
        anchor = take(own["anchor"], fragment)
        ways = jax.tree.map(jnp.subtract, between.spread(anchor), each)
        way, code = CODES[self.wire].gradients(ways, own["code"], between)
        return jax.tree.map(jnp.subtract, anchor, way), code

    def _apply(self, number: int, fragment: Fragment, params: Tree, own: Tree, between: "Between") -> tuple[Tree, Tree]:
        """Returns parameters and state after a step of the outer optimizer along the way that a fragment has gone."""
        import jax

        part = _is_of(own["anchor"])
        held = jax.tree.map(lambda x: take(x, fragment) if part(x) else x[number], own["outer"], is_leaf=part)
        anchor, held = stepped(self.chain, take(own["anchor"], fragment), take(own["sent"], fragment), held)
        back = lambda x, y: put(x, fragment, y) if part(x) else x.at[number].set(y)  # noqa: E731
        outer = jax.tree.map(back, own["outer"], held, is_leaf=part)
        spread = _only(between, fragment).spread(anchor)
        mixed = jax.tree.map(lambda w, a: self.blend * w + (1 - self.blend) * a, take(params, fragment, dim=1), spread)
        return put(params, fragment, mixed, dim=1), {
            **own, "anchor": put(own["anchor"], fragment, anchor), "outer": outer,
        }  # fmt: skip

    def _at(self, place: int) -> int | None:
        """Returns which fragment is sent at a place of the period, from 0."""
        distance = self.every // self.fragments
        number, rest = divmod(place % self.every + 1, distance)
        return None if rest else number - 1


def _is_of(flat: Tree) -> Callable[[Any], bool]:
    """Returns a function of trees that says which have an array for each parameter."""
    whole = flat.keys()
    return lambda tree: isinstance(tree, dict) and tree.keys() == whole


def _only(between: "Between", fragment: Fragment) -> "Between":
    parts = {path: share(between.parts[path], layers) for path, layers in fragment.items()}
    return replace(between, specs={path: between.specs[path] for path in fragment}, parts=parts)
