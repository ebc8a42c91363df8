"""Chooses the planner's model of a job: formulas for a decoder, a JAX trace for other models or optimizer states.

decoder, adamw, adam, lamb, sgd, lion or lars    arithmetic: JAX is not imported
decoder with another optimizer, optimizer arguments or frozen parameters
                                                 formulas; the state's bytes are traced from the shapes of matrices
any other model, a decoder of experts            traced entirely
"""

import dataclasses

from jaxpar.errors import refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.names import custom_loss, model_settings, model_table
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import MOMENTS, Recipe, recipe
from jaxpar.plan.model_protocol import Model, Transformer


def needs_jax(job: Job) -> bool:
    """Whether planning a job imports JAX: to trace its model or state, or because of a user's own loss."""
    return not has_formulas(job) or not _is_counted(job) or ":" in job.train.loss


def planner_model(job: Job, devices: int) -> Model:
    """Returns the planner's model of a job on `devices` devices.

    Raises:
      JaxparError: If a decoder computes in float32, which the formulas do not cover, or a model cannot be traced.
    """
    if job.train.loss == "dpo":
        raise refuse(
            'train.loss = "dpo"',
            rule="the planner models steps of one model on one row per example; DPO runs two models on two rows",
            fix="jaxpar inspect JOB, which compiles its step and counts it",
        )
    if not has_formulas(job):
        from jaxpar.job.parts.plan_traced import trace_job

        return trace_job(job, devices)
    custom_loss(job)  # refuses a loss that does not exist
    settings = model_settings(job)
    if job.train.precision.compute != "bf16":
        raise refuse(
            f"train.precision = {job.train.precision.compute!r}",
            rule="the planner's formulas are for decoders that compute in bfloat16",
            fix="train.precision=bf16, after JOB on the command line",
        )
    shape = dataclasses.replace(Shape.from_settings(settings), seq=job.data.seq, trained=_trained_share(job))
    return Transformer(shape=shape, recipe=_recipe(job))


def _trained_share(job: Job) -> float:
    if not job.train.frozen[0]:
        return 1.0
    from jaxpar.job.parts.plan_traced import trained_share

    return trained_share(job)


def has_formulas(job: Job) -> bool:
    """Whether there are formulas: for a dense decoder."""
    return model_table(job)[0] == "decoder" and not model_settings(job).experts.count


def _is_counted(job: Job) -> bool:
    """Whether the optimizer state is a fixed number of bytes per parameter; arguments may change its dtype."""
    return job.optimizer.name in MOMENTS and not job.optimizer.arguments and not job.train.frozen[0]


def _recipe(job: Job) -> Recipe:
    if _is_counted(job):
        return recipe(job.optimizer.name, momentum=job.optimizer.beta1 > 0)
    from jaxpar.job.parts.plan_traced import state_recipe

    return state_recipe(job)
