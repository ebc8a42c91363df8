"""Pipeline parallelism: stages of consecutive layers, run by the table of a schedule."""

from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.declaration import Axes, Parallel, Pipeline
from jaxpar.parallel.head_placement import choose_schedule, merge_lists_into_stacks, place_head
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.techniques.base import Compose, Technique
from jaxpar.parallel.unsharded_arrays import unsharded_problem


def problems(parallel: Parallel) -> list[Problem]:
    """Returns the problems of `pipeline`."""
    if not isinstance(parallel.pipeline, Pipeline):
        return [
            Problem(
                f"pipeline={parallel.pipeline!r:.60}",
                "pipeline is a jp.Pipeline",
                'jp.Pipeline(schedule="1f1b_phased")',
            )
        ]
    if parallel.pipeline == Pipeline():
        return []
    from jaxpar.parallel import pipeline_problems  # no part of a step without a pipeline

    return pipeline_problems.problems(parallel)


def names(parallel: Parallel) -> dict[str, Axes]:
    """Returns the axes of stacked layers, and of a vocabulary that is spread over the stages.

    In a pipeline a lookup table is split by rows, like a head, because both may be spread over the stages.
    """
    even = parallel.pipe > 1 and not parallel.pipeline.layers and not parallel.pipeline.stages
    spread = parallel.pipe > 1 and parallel.pipeline.head == "spread"
    rows: Axes = ("pipe", "tensor") if spread else "tensor"
    table: dict[str, Axes] = {"vocab_table": rows, "embed_table": None} if parallel.pipe > 1 else {}
    return {"layers": "pipe" if even else None} | table | ({"vocab": rows} if spread else {})


def stack_problems(layout: Layout) -> list[Problem]:
    """Returns the problems that prevent a split of the model over `pipe` with its schedule."""
    stages = layout.sizes["pipe"]
    if stages == 1:
        return []
    try:
        schedule = layout.schedule
        if layout.parallel.pipeline.head == "spread" and not layout.schedule.phased:
            raise refuse(
                f'head="spread" with schedule {layout.schedule.name}',
                rule="all stages run a spread head in the same tick, which only a phased schedule guarantees",
                fix='schedule="1f1b_phased" or another phased one, or head="last"',
            )
    except JaxparError as error:
        return list(error.problems)
    if layout.parallel.pipeline.stages:
        from jaxpar.parallel import pipeline_problems

        return pipeline_problems.number_problems(layout.parallel.pipeline, layout.schedule)
    layout = merge_lists_into_stacks(layout)
    stacks = {layout.placements[path].leaf.shape[0] for path in layout.stacked_paths}
    if not stacks and any(place.names[:1] == ("layers",) for place in layout.placements.values()):
        return []  # `resolve` has reported why it is not split
    if not stacks:
        return [
            Problem(
                f"pipe={stages} cuts nothing: {layout.blueprint.name} has no stack of layers that {stages} divides",
                "a pipeline cuts parameters stacked along a dim 0 named layers; one named weight of a stack is enough; "
                "or a list of layers whose parameters have equal names and shapes",
                f"equal layers, stacked (nnx.vmap, nn.scan) or in a list, a multiple of {stages} of them; or pipe=1",
            )
        ]
    if uneven := layout.parallel.pipeline.layers:
        wrong = {layers for layers in stacks if layers != sum(uneven)}
        chunked = Problem(
            f"layers={tuple(uneven)} with chunks={schedule.chunks}",
            "stages with different numbers of layers have one chunk each",
            'schedule="1f1b_phased", or another with one chunk',
        )
        return [chunked] * (schedule.chunks > 1) + [
            Problem(
                f"layers={tuple(uneven)} are {sum(uneven)}, {layout.blueprint.name} has {layers}",
                "every layer is on one stage",
                f"{len(uneven)} numbers that sum to {layers}",
            )
            for layers in sorted(wrong)
        ]
    return [
        Problem(
            f"{layers} layers in {schedule.parts} parts (pipe={stages} x chunks={schedule.chunks})",
            "every part has as many layers as the others",
            f"{-(-layers // schedule.parts) * schedule.parts} layers, or other pipe and chunks",
        )
        for layers in sorted(stacks)
        if layers % schedule.parts
    ]


def replication_problems(layout: Layout) -> list[Problem]:
    """Returns the large parameters of layers that would be replicated on every stage.

    With uneven stages, or lists of layers, stored parameters are split along another dim than layers.
    """
    if layout.sizes["pipe"] == 1:
        return []
    rule = "if stages have different numbers of layers, pipe divides another dim of each parameter"
    listed = {path for paths in layout.lists.values() for path in paths}
    places = {path: layout.placements[path] for path in (*layout.stacked_paths, *listed)}
    problems = (
        unsharded_problem(place.leaf, path, place.stored, layout, ("pipe",), rule, "stages with equally many layers")
        for path, place in places.items()
        if not any("pipe" in spec_axes(entry) for entry in place.stored)
    )
    return [problem for problem in problems if problem]


def resolve(layout: Layout, compose: Compose) -> Layout:
    """Chooses the stages of embedding and head, then the schedule, because a spread head needs a phased one."""
    return choose_schedule(place_head(layout, compose))


def idle(layout: Layout) -> list[Problem]:
    """Returns the problems that prevent a split of the model over `pipe`, or large parts that would be replicated."""
    return stack_problems(layout) or replication_problems(layout)


PIPE = Technique(axis="pipe", problems=problems, names=names, idle=idle, resolve=resolve)
