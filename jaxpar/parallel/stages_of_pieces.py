"""Checks `Pipeline.stages`, the numbers of pieces that the stages of different programs run."""

from jaxpar.errors import Problem
from jaxpar.parallel.pipeline_options import Pipeline


def stage_problems(pipeline: Pipeline, pipe: int) -> list[Problem]:
    """Returns the problems of the numbers of pieces of a pipeline with so many stages."""
    if not isinstance(pipeline.stages, tuple | list) or any(type(n) is not int or n < 1 for n in pipeline.stages):
        return [Problem(f"stages={pipeline.stages!r}", "the pieces of each stage, at least one", "stages=(3, 5)")]
    pieces, errors = f"stages={tuple(pipeline.stages)}", []
    if len(pipeline.stages) != pipe:
        fix = f"{pipe} numbers, or pipe={len(pipeline.stages)}"
        errors.append(Problem(f"{pieces} for pipe={pipe}", "there is one number of pieces for each stage", fix))
    given = {
        "layers": bool(pipeline.layers),
        "stack": bool(pipeline.stack),
        f"chunks={pipeline.chunks}": pipeline.chunks > 1,
        f"gather={pipeline.gather!r}": pipeline.gather != "step",
        f"head={pipeline.head!r}": pipeline.head == "spread",
        f"keep={pipeline.keep!r}": pipeline.keep != "inputs",
        f"weights={pipeline.weights!r}": pipeline.weights != "flush",
    }
    errors += [
        Problem(f"{pieces} with {key}", "this is for stages of equal layers alone", f"{key} left out, or stages=()")
        for key, is_given in given.items()
        if is_given
    ]
    return errors
