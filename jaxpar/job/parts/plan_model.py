"""The model of a job as a plan sees it: a decoder by formulas, any other, or another optimizer's state, traced.

decoder, adamw, adam, lamb, sgd, lion or lars    arithmetic: JAX is not imported
decoder, another optimizer, one with arguments, or a part is frozen
                                                 the state depends on the shapes of matrices: they are traced
any other model                                  nothing is known of it but what tracing shows
"""

import dataclasses

from jaxpar.errors import refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.names import named, own_loss, settings_of
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import MOMENTS, Recipe, recipe
from jaxpar.plan.planned import Model, Transformer


def needs_jax(job: Job) -> bool:
    """Returns whether planning a job imports JAX: to trace its model or its state, or with the user's own loss."""
    return not _has_formulas(job) or not _is_counted(job) or ":" in job.train.loss


def subject(job: Job, devices: int) -> Model:
    """Returns the model of a job, to be planned for so many devices.

    Raises:
      JaxparError: If a decoder computes in float32, for which there are no formulas, or a model cannot be traced.
    """
    if not _has_formulas(job):
        from jaxpar.job.parts.plan_traced import traced

        return traced(job, devices)
    own_loss(job)  # refuses one that there is not
    settings = settings_of(job)
    if job.train.precision.compute != "bf16":
        raise refuse(
            f"train.precision = {job.train.precision.compute!r}",
            rule="the planner's formulas are of a decoder that computes in bfloat16",
            fix="train.precision=bf16, after JOB on the command line",
        )
    shape = dataclasses.replace(Shape.of(settings), seq=job.data.seq, trained=_trained(job))
    return Transformer(shape=shape, recipe=_recipe(job))


def _trained(job: Job) -> float:
    """Returns the share of the weights that is trained."""
    if not job.train.frozen[0]:
        return 1.0
    from jaxpar.job.parts.plan_traced import trained_share

    return trained_share(job)


def _has_formulas(job: Job) -> bool:
    return named(job)[0] == "decoder"


def _is_counted(job: Job) -> bool:
    """Whether the state of a job's optimizer is so many bytes per parameter; further arguments may change its dtype."""
    return job.optimizer.name in MOMENTS and not job.optimizer.arguments and not job.train.frozen[0]


def _recipe(job: Job) -> Recipe:
    if _is_counted(job):
        return recipe(job.optimizer.name, momentum=job.optimizer.beta1 > 0)
    from jaxpar.job.parts.plan_traced import counted

    return counted(job)
