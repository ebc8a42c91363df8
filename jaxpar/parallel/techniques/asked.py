"""What all techniques together say of a declaration and of a layout."""

from jaxpar.errors import Problem
from jaxpar.mesh.axes import AXES
from jaxpar.parallel.declare import Axes, Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.table import TECHNIQUES
from jaxpar.sharding.rules import names_of_dims


def declared(parallel: Parallel) -> list[Problem]:
    """Returns what is wrong with a declaration, before any model or device."""
    return [problem for each in TECHNIQUES.values() for problem in each.problems(parallel)] + parallel.problems()


def names_of(parallel: Parallel) -> dict[str, Axes]:
    """Returns names of dims to mesh axes, those of the user first."""
    names = names_of_dims(parallel.sizes)
    for each in TECHNIQUES.values():
        names |= each.names(parallel)
    user = dict(parallel.rules)
    return {**user, **{name: axes for name, axes in names.items() if name not in user}}


def idle(layout: Layout) -> list[Problem]:
    """Returns why axes do nothing for a model: by their techniques, and those that no technique uses."""
    used = [each for axis, each in TECHNIQUES.items() if axis in layout.sizes]
    found = [problem for each in used for problem in each.idle(layout)]
    return found + [
        Problem(
            f"{axis}={size} does nothing: no technique uses the axis `{axis}`",
            f"an axis is there to be used; techniques are there for {', '.join(TECHNIQUES)}",
            f"{axis}=1, or a technique of your own in jaxpar.parallel.techniques.table.TECHNIQUES",
        )
        for axis, size in layout.sizes.items()
        if size > 1 and axis in AXES and axis not in TECHNIQUES
    ]
