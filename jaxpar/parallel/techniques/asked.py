"""Asks all techniques together: of a declaration, of a layout, and while its step is traced."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import Problem, nearest, refuse
from jaxpar.mesh.axes import AXES
from jaxpar.mesh.preset import Option
from jaxpar.models.islands import implemented
from jaxpar.parallel.declare import Axes, Parallel
from jaxpar.parallel.grouped import split_convolutions
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Compose, Traced
from jaxpar.parallel.techniques.open_choice import Choose
from jaxpar.parallel.techniques.table import TECHNIQUES
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.author.rules_in_force import check_rules_in_force
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.nnx.hooks import hooked
from jaxpar.sharding.rules import names_of_dims
from jaxpar.sharding.vocabularies import meant, with_vocabularies


def declared(parallel: Parallel) -> list[Problem]:
    """Returns what is wrong with a declaration, before any model or device."""
    found = [problem for each in TECHNIQUES.values() for problem in each.problems(parallel)]
    return found + parallel.problems() + _how_problems(parallel)


def names_of(parallel: Parallel) -> dict[str, Axes]:
    """Returns names of dims to mesh axes, those of the user first, and after each what others call the same."""
    names = names_of_dims(parallel.sizes)
    for each in TECHNIQUES.values():
        names |= each.names(parallel)
    user = dict(parallel.rules)
    if "vocab" in user:  # of a table that is looked up too: only by themselves are its rows another matter
        user.setdefault("vocab_table", user["vocab"])
    return with_vocabularies({**user, **{name: axes for name, axes in names.items() if name not in user}})


def idle(layout: Layout) -> list[Problem]:
    """Returns why axes do nothing for a model: by their techniques, and those that no technique uses."""
    used = [each for axis, each in TECHNIQUES.items() if axis in layout.sizes]
    found = [problem for each in used for problem in each.idle(layout)]
    return found + [
        Problem(
            f"{axis}={size} does nothing: no technique uses the axis `{axis}`",
            f"every axis of the mesh splits work, by its technique; there are techniques for {', '.join(TECHNIQUES)}",
            f"{axis}=1, or a technique of your own in jaxpar.parallel.techniques.table.TECHNIQUES",
        )
        for axis, size in layout.sizes.items()
        if size > 1 and axis in AXES and axis not in TECHNIQUES
    ]


def settled(layout: Layout, compose: Compose) -> Layout:
    """Returns a layout in which each technique has chosen what the declaration left to it."""
    for axis, each in TECHNIQUES.items():
        if layout.sizes.get(axis, 1) > 1:
            layout = each.settle(layout, compose)
    return layout


def islands(layout: Layout, step: Traced) -> dict[str, Callable]:
    """Returns what runs the islands of a model in a step, by the names of the islands.

    A technique whose axis is not there runs those that no other does: `gather` goes by the names of dims, which a
    user's rules, or sequence parallelism, cut over other axes than `context`.
    """
    found: dict[str, Callable] = {}
    parallel = layout.parallel
    for axis, each in TECHNIQUES.items():
        if each.how:
            own = each.bind(layout, each.how[parallel.ways.get(axis, next(iter(each.how)))], step)
            # an axis that is there decides; one that is not only fills in what no other runs
            found = {**found, **own} if parallel.sizes.get(axis, 1) > 1 else {**own, **found}
    return found


@dataclass
class Used:
    """The use that a model made of jaxpar in all traces of a step. JAX traces once what is lowered twice: it is kept.

    Attributes:
      names: Names of dims of activations, in the model's words and in jaxpar's.
      islands: Names of islands that were called.
      forms: In which form they ran, where that was chosen as the step was traced: sentences.
    """

    names: set[str] = field(default_factory=set)
    islands: set[str] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)


@contextmanager
def traced(layout: Layout, used: Used, choose: Choose, *, keeps: bool = False) -> Iterator[None]:
    """Gives names of dims and islands their meaning in a layout while a step of it is traced, and notes their use.

    Args:
      layout: Of the step.
      used: Where it is noted.
      choose: Answers what the declaration left to a plan.
      keeps: Whether the backward pass keeps what layers compute.
    """
    check_rules_in_force(layout.blueprint)
    names, found = activation_names(layout.names, layout.sizes), islands(layout, Traced(choose=choose, keeps=keeps))
    with names as named, implemented(found) as called, sharding_translation(), hooked(), split_convolutions():
        yield
    used.names |= meant(named)
    used.forms |= {each for each in called if " " in each}
    used.islands |= called - used.forms


def check(layout: Layout, used: Used, lowered: Any) -> None:
    """Lets each technique whose axis is used look at what a model used in a step, and at the lowered program.

    Raises:
      JaxparError: If a technique can't do what it should; if the declaration chose how an island runs, and the model
        never called it.
    """
    for axis, technique in TECHNIQUES.items():
        if layout.sizes.get(axis, 1) > 1:
            technique.check(layout, used.names, lowered)
    for axis, way in layout.parallel.ways.items():
        if not used.islands & (calls := TECHNIQUES[axis].how[way].keys()):
            raise refuse(
                f"how={{{axis!r}: {way!r}}}, but {layout.blueprint.name} never calls {_functions(calls)}",
                rule=f"{way!r} says how {_functions(calls)} runs, so the model calls it",
                fix=f"{_functions(calls)} in the model, or leave how out{_LIMITS.get(axis, '')}",
            )


# what a model may need of an island that it does not have, with the way that runs such a model
_LIMITS = {
    "context": "; jp.attention(..., softcap=50.0) caps scores (Gemma 2); attention with a bias (T5, ALiBi), which it "
    'does not have, runs as it is written with context_by="gather"',
}


def told(layout: Layout) -> list[Option]:
    """Returns what XLA is told for the axes that are used."""
    used = [each for axis, each in TECHNIQUES.items() if layout.sizes.get(axis, 1) > 1]
    return [option for each in used for option in each.told(layout)]


def _how_problems(parallel: Parallel) -> list[Problem]:
    """Returns ways that no technique has, or that would do nothing."""
    ways = {axis: each.how for axis, each in TECHNIQUES.items() if each.how}
    rule = "how names a way of a technique: " + "; ".join(f"{axis}: {', '.join(each)}" for axis, each in ways.items())
    if not isinstance(parallel.how, Mapping):
        return [Problem(f"how={parallel.how!r:.60}", rule, 'how={"context": "gather"}')]
    found = []
    for axis, way in parallel.how.items():
        got = f"how={{{axis!r}: {way!r}}}"
        if axis not in ways:
            found.append(Problem(got, rule, nearest(str(axis), ways)))
        elif str(way) not in ways[axis]:
            found.append(Problem(got, rule, nearest(str(way), ways[axis])))
        elif parallel.sizes.get(axis, 1) == 1:
            fix = f"{axis}=2 or more, or leave how out"
            found.append(Problem(f"{got} with {axis}=1 does nothing", f"it says how `{axis}` runs what it splits", fix))
    return found


def _functions(names: Iterable[str]) -> str:
    return ", ".join(f"jp.{name}" for name in sorted(names))
