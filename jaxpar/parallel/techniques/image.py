"""Spatial parallelism: devices share every image or volume, each with a piece of it (Dryden et al. 2019,
arXiv:1903.06681).

The step constrains the images and the results of convolutions (`jaxpar.parallel.convolutions`), and XLA propagates the
pieces through everything between them: pooling, norms whose statistics are of the whole image, and losses.
"""

from collections.abc import Mapping
from functools import partial

from jaxpar.errors import Problem, refuse
from jaxpar.models.dim_names import SPATIAL, spec_axes
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Technique


def problems(parallel: Parallel, axis: str) -> list[Problem]:
    """Returns the problems of an axis of images in a pipeline, or with replicas that step apart."""
    size, errors = parallel.sizes.get(axis, 1), []
    if size != 1 and parallel.pipe != 1:
        got, rule = f"{axis}={size} with pipe={parallel.pipe}", "images are split where there is no pipeline"
        errors.append(Problem(got, rule, f"pipe=1, or {axis}=1"))
    if size != 1 and parallel.exchange.per_replica:
        got, rule = f"{axis}={size} with exchange {parallel.exchange}", "images are split where replicas step together"
        errors.append(Problem(got, rule, f"{axis}=1, or leave the exchange out"))
    rules = parallel.rules if isinstance(parallel.rules, Mapping) else {}  # others are refused where rules are checked
    height, width = (rules.get(dim, dim) for dim in SPATIAL)
    if axis == "height" and height and height == width:
        got, rule = f"rules split height and width over {height}", "an axis splits an array once"
        errors.append(Problem(got, rule, 'another axis for one of them, as rules={"height": "height"}'))
    return errors


def check(layout: Layout, named: set[str], _: object, axis: str) -> None:
    """Refuses an axis that splits no image.

    Raises:
      JaxparError: If the model has no convolution whose image the axis splits.
    """
    splits = {name for name, axes in layout.names.items() if axis in spec_axes(axes)}
    if splits & named:
        return
    size = layout.sizes[axis]
    raise refuse(
        f"{axis}={size} splits no image of {layout.blueprint.name}",
        rule=f"`{axis}` splits the images of convolutions that have at least {size} rows, before and after",
        fix=f"a smaller {axis}, larger images, or {axis}=1 for a model without convolutions",
    )


def _technique(axis: str) -> Technique:
    return Technique(axis=axis, problems=partial(problems, axis=axis), check=partial(check, axis=axis))


HEIGHT, WIDTH = _technique("height"), _technique("width")
