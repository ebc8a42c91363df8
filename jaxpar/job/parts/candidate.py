"""The layout of a job as a planner candidate; a run records it, so that its report can show the prediction."""

from jaxpar.job.file.schema import Job
from jaxpar.parallel.declaration import DECLARED
from jaxpar.parallel.layout import Layout
from jaxpar.plan.candidate import Candidate


def candidate_of(job: Job, layout: Layout) -> Candidate:
    """Converts the layout of a job to a planner candidate.

    Raises:
      JaxparError: If the planner cannot model it: a custom pipeline schedule, or a remat without a cost model.
    """
    sizes, parallel, piped = layout.sizes, layout.parallel, layout.sizes["pipe"] > 1
    microbatches = layout.microbatches if piped else job.train.accumulate
    return Candidate(
        **{axis: sizes[axis] for axis in DECLARED},
        axes={axis: size for axis, size in sizes.items() if axis not in DECLARED},
        zero=parallel.stage, sequence=bool(parallel.sequence), remat=job.train.remat,
        schedule=layout.schedule.name if piped else Candidate.schedule, chunks=layout.schedule.chunks if piped else 1,
        head=parallel.pipeline.head if piped else "last", microbatches=microbatches,
        microbatch=max(1, job.train.global_batch // (layout.replicas * microbatches)),
    )  # fmt: skip
