"""Calls the hooks of all techniques: on a declaration, on a layout, and while a step is traced."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from jax.stages import Lowered

from jaxpar.errors import Problem, refuse, suggest
from jaxpar.mesh.axes import AXES
from jaxpar.mesh.xla import CompilerOption
from jaxpar.models.islands import use_islands
from jaxpar.parallel.convolutions import split_convolutions
from jaxpar.parallel.declaration import Axes, Parallel, size_setting
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.read_parameter import gather_stacks_once
from jaxpar.parallel.techniques.base import Choose, Compose, Technique, TracedStep, refuse_choice
from jaxpar.parallel.techniques.context import CONTEXT
from jaxpar.parallel.techniques.data import DATA
from jaxpar.parallel.techniques.expert import EXPERT
from jaxpar.parallel.techniques.image import HEIGHT, WIDTH
from jaxpar.parallel.techniques.pipe import PIPE
from jaxpar.parallel.techniques.sharding import SHARDING
from jaxpar.parallel.techniques.tensor import TENSOR
from jaxpar.sharding.author.explicit import sharding_translation
from jaxpar.sharding.author.rules_in_force import check_rules_in_force
from jaxpar.sharding.constrain import activation_names, with_meanings, with_vocabularies
from jaxpar.sharding.nnx_hooks import step_hooks
from jaxpar.sharding.rules import axes_by_dim_name
from jaxpar.tables import replace_rows

TECHNIQUES: dict[str, Technique] = {
    technique.axis: technique for technique in (PIPE, DATA, SHARDING, EXPERT, HEIGHT, WIDTH, CONTEXT, TENSOR)
}


@contextmanager
def with_technique(technique: Technique) -> Iterator[None]:
    """Adds a technique, or replaces the one of its axis, until the context ends.

    This also adds an implementation of a model's islands to one of jaxpar's techniques:
    `with_technique(replace(CONTEXT, how={**CONTEXT.how, "mine": {"attention": mine}}))`.
    """
    with replace_rows(TECHNIQUES, {**TECHNIQUES, technique.axis: technique}):
        yield


def declaration_problems(parallel: Parallel) -> list[Problem]:
    """Returns the problems of a declaration that do not depend on model and devices."""
    problems = [problem for technique in TECHNIQUES.values() for problem in technique.problems(parallel)]
    return problems + parallel.problems() + _implementation_problems(parallel)


def all_dim_names(parallel: Parallel) -> dict[str, Axes]:
    """Maps names of dims to mesh axes: the user's names first, each name followed by its names in other code bases."""
    names = axes_by_dim_name(parallel.sizes)
    for technique in TECHNIQUES.values():
        names |= technique.names(parallel)
    user = dict(parallel.rules)
    if "vocab" in user:  # the rule also covers lookup tables, unless the user has one for `vocab_table` itself
        user.setdefault("vocab_table", user["vocab"])
    return with_vocabularies({**user, **{name: axes for name, axes in names.items() if name not in user}})


def idle_problems(layout: Layout) -> list[Problem]:
    """Returns a problem for each axis that has no effect on a model, or that no technique uses."""
    techniques = [technique for axis, technique in TECHNIQUES.items() if axis in layout.sizes]
    problems = [problem for technique in techniques for problem in technique.idle(layout)]
    return problems + [
        Problem(
            f"{axis}={size} does nothing: no technique uses the axis `{axis}`",
            f"every axis of the mesh splits work, by its technique; there are techniques for {', '.join(TECHNIQUES)}",
            f"{size_setting(axis, 1)}, or a technique of your own in "
            "jaxpar.parallel.techniques.all_techniques.TECHNIQUES",
        )
        for axis, size in layout.sizes.items()
        if size > 1 and axis in AXES and axis not in TECHNIQUES
    ]


def resolve(layout: Layout, compose: Compose) -> Layout:
    """Lets each technique make the choices that the declaration left open; returns the new layout."""
    for axis, technique in TECHNIQUES.items():
        if layout.sizes.get(axis, 1) > 1:
            layout = technique.resolve(layout, compose)
    return layout


def islands(layout: Layout, step: TracedStep) -> dict[str, Callable]:
    """Maps the names of islands to their implementations in a step.

    An axis of size 1 still provides its default implementation for islands that no active axis implements; e.g.
    `gather` also serves user rules, or sequence parallelism over `tensor`, without `context`.
    """
    result: dict[str, Callable] = {}
    parallel = layout.parallel
    for axis, technique in TECHNIQUES.items():
        if technique.how:
            functions = technique.bind(
                layout, technique.how[parallel.implementations.get(axis, next(iter(technique.how)))], step
            )
            # an active axis decides; an axis of size 1 only fills in islands that no other implements
            result = {**result, **functions} if parallel.sizes.get(axis, 1) > 1 else {**functions, **result}
    return result


@dataclass
class ModelUse:
    """Names and islands that a model used in all traces of a step, since JAX traces a program only once.

    Attributes:
      names: Names of dims of activations, both the model's names and jaxpar's.
      islands: Names of the islands that the model called.
      forms: Sentences on the implementations that were chosen during tracing.
    """

    names: set[str] = field(default_factory=set)
    islands: set[str] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)


@contextmanager
def tracing(
    layout: Layout, model_use: ModelUse, choose: Choose = refuse_choice, *, saves_activations: bool = False
) -> Iterator[None]:
    """Context for tracing a step: maps dim names to axes, implements islands, and records the use of both.

    Args:
      layout: Layout of the step.
      model_use: Record of the use.
      choose: Chooses the implementation of attention if the declaration leaves it to a planner.
      saves_activations: Whether layers save activations for the backward pass.
    """
    check_rules_in_force(layout.blueprint)
    names, table = (
        activation_names(layout.names, layout.sizes),
        islands(layout, TracedStep(choose=choose, saves_activations=saves_activations)),
    )
    processors = layout.mesh is not None and layout.mesh.devices.flat[0].platform == "cpu"
    with names as dim_names, use_islands(table) as calls, sharding_translation(), step_hooks(), gather_stacks_once():
        with split_convolutions(processors=processors):
            yield
    model_use.names |= with_meanings(dim_names)
    model_use.forms |= {call for call in calls if " " in call}
    model_use.islands |= calls - model_use.forms


def check(layout: Layout, model_use: ModelUse, lowered: Lowered) -> None:
    """Calls `check` of each technique in use, on the names that a model used in a step and the lowered program.

    Raises:
      JaxparError: If a technique does not support the model; if the declaration chose the implementation of an island
        that the model never called.
    """
    for axis, technique in TECHNIQUES.items():
        if layout.sizes.get(axis, 1) > 1:
            technique.check(layout, model_use.names, lowered)
    for axis, way in layout.parallel.implementations.items():
        if not model_use.islands & (calls := TECHNIQUES[axis].how[way].keys()):
            raise refuse(
                f"how={{{axis!r}: {way!r}}}, but {layout.blueprint.name} never calls {_functions(calls)}",
                rule=f"{way!r} is an implementation of {_functions(calls)}, which the model must call",
                fix=f"{_functions(calls)} in the model, or leave how out{_LIMITS.get(axis, '')}",
            )


def island_fixes(layout: Layout, model_use: ModelUse) -> list[str]:
    """Returns the islands that a model should call if its devices repeat each other's work, as text."""
    fixes = [TECHNIQUES[axis].island_fix(layout, model_use.islands) for axis in layout.sizes if axis in TECHNIQUES]
    return [fix for fix in fixes if fix]


# per axis, features that its islands lack, with the implementation that runs models that need them
_LIMITS = {
    "context": "; jp.attention(..., softcap=50.0) caps scores (Gemma 2); attention with a bias (T5, ALiBi), which it "
    'does not have, runs as it is written with context_by="gather"',
}


def compiler_options(layout: Layout) -> list[CompilerOption]:
    """Returns the XLA options for the axes in use."""
    techniques = [technique for axis, technique in TECHNIQUES.items() if layout.sizes.get(axis, 1) > 1]
    return [option for technique in techniques for option in technique.compiler_options(layout)]


def _implementation_problems(parallel: Parallel) -> list[Problem]:
    ways = {axis: item.how for axis, item in TECHNIQUES.items() if item.how}
    rule = "how names a way of a technique: " + "; ".join(f"{axis}: {', '.join(item)}" for axis, item in ways.items())
    if not isinstance(parallel.how, Mapping):
        return [Problem(f"how={parallel.how!r:.60}", rule, 'how={"context": "gather"}')]
    problems = []
    for axis, way in parallel.how.items():
        got = f"how={{{axis!r}: {way!r}}}"
        if axis not in ways:
            problems.append(Problem(got, rule, suggest(str(axis), ways)))
        elif str(way) not in ways[axis]:
            problems.append(Problem(got, rule, suggest(str(way), ways[axis])))
        elif parallel.sizes.get(axis, 1) == 1:
            fix = f"{size_setting(axis, 2)} or more, or leave how out"
            problems.append(
                Problem(f"{got} with {axis}=1 does nothing", f"it says how `{axis}` runs what it splits", fix)
            )
    return problems


def _functions(names: Iterable[str]) -> str:
    return ", ".join(f"jp.{name}" for name in sorted(names))
