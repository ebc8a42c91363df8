"""Expert parallelism: all-to-alls of the slots of mixtures, and the training state of parameters outside of experts.

    tokens       two all-to-alls forward and two backward for each mixture and microbatch, and two more where remat
                 computes the layer again; each of the slots of a device's rows, the empty ones too
    parameters   that are no experts: all-reduces of their gradients, or gathers and reduce-scatters by ZeRO

All are priced as exposed, but for the share of ZeRO's that the software hides. Slots have the number that the model
gives experts: the load does not change the time, only which slots are empty. Source: Lepikhin et al. 2020,
arXiv:2006.16668, section 3.2.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Style
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import PlanTechnique, SentCollective

if TYPE_CHECKING:  # a plan of a decoder does not import JAX
    from jaxpar.plan.model.tracing import ModelTrace

NAME = "expert"  # of the dim of experts


def step(model: Any, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    """Yields the collectives over `expert` of a traced model."""
    if isinstance(model, Shape):  # a decoder of dense layers
        return
    yield from _tokens(model.trace, candidate, software)
    yield from _state(model.parameters - model.parameters_by_dim.get(NAME, 0), candidate, software)


def _tokens(trace: "ModelTrace", candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    recomputes: Any = np.asarray(candidate.remat) != "none"
    for elements, times in trace.slots:
        payload = software.wire[0] * elements * candidate.microbatch
        once = 2 * times * candidate.microbatches
        for backward, again, count in ((False, False, once), (True, False, once), (True, True, once * recomputes)):
            travels = Collective(
                kind="all-to-all", axes=(NAME,), dtype="bf16" if software.wire[0] == 2 else "f32",
                group=candidate.size(NAME), times=count, payload=payload, backward=backward,
            )  # fmt: skip
            yield SentCollective(collective=travels, recomputed=again)


def _state(parameters: int, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    count, zero = candidate.microbatches, np.asarray(candidate.zero)
    share, exposed = parameters / candidate.fsdp, 1 - software.overlap
    gathers = np.where(software.keeps_gathered(candidate), 1, 2)
    each = count if software.reduce_every_microbatch else 1
    kinds: Any = (
        ("all-reduce", software.wire[1], np.where(zero == 0, each, 0)),
        ("all-gather", software.wire[0], np.select([zero == 0, zero == 3], [0, gathers * count], 1)),
        ("reduce-scatter", software.wire[1], np.select([zero == 0, zero == 1], [0, each], count)),
    )
    for kind, width, times in kinds:
        travels = Collective(
            kind=kind, axes=(NAME,), dtype="bf16" if width == 2 else "f32", group=candidate.size(NAME), times=times,
            payload=width * share, backward=kind != "all-gather",
        )  # fmt: skip
        yield SentCollective(collective=travels, exposed=exposed)


EXPERT = PlanTechnique(
    axis="expert",
    step=step,
    cause="experts",
    styles={"experts": Style(letter="P", shade=167, light="#c44e52", dark="#e07b7f")},
)
