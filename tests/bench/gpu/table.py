"""The table of stages, in the order in which they are wanted: what comes last may be left for another day."""

from jaxpar.errors import refuse, suggest

from ..gpu.stage import Stage
from ..gpu.stages import attention, flags, gemm, kernels, layers, machine, memory, models, offload, parity

STAGES: tuple[Stage, ...] = (
    machine.STAGE, gemm.STAGE, *models.STAGES, memory.STAGE, parity.STAGE, attention.STAGE, kernels.STAGE,
    offload.STAGE, flags.STAGE, layers.STAGE,
)  # fmt: skip


def chosen(names: str) -> tuple[Stage, ...]:
    """Returns the stages of some names with commas between them; all for "".

    Raises:
      JaxparError: If there is no such stage.
    """
    known = {stage.name: stage for stage in STAGES}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    for name in wanted:
        if name not in known:
            raise refuse(f"--only {name}", rule=f"stages are {', '.join(known)}", fix=suggest(name, known))
    return tuple(stage for stage in STAGES if stage.name in wanted)
