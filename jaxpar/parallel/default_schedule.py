"""The schedule of a pipeline whose declaration names none: `1f1b_phased`, and `1f1b` on simulated devices.

    1f1b_phased    in a tick all stages run the same kind of op. The program has no conditional, so idle stages compute
                   too, and drop the result
    1f1b           each stage takes the branch of its own op; an idle stage computes nothing

An idle GPU has nothing else to do, and a conditional costs it a round trip to its host in every tick. Simulated devices
share the cores of one machine: there, the work of idle stages takes time from the others. Both schedules make the same
updates, up to rounding: microbatches are summed in the same order.
"""

from dataclasses import replace

from jaxpar.mesh.axes import AXES
from jaxpar.parallel.layout import Layout, with_note
from jaxpar.parallel.pipeline_options import PHASED, UNNAMED

MIXED = "1f1b"


def choose_schedule(layout: Layout) -> Layout:
    """Sets the schedule of a layout whose pipeline names none, and says why in `Layout.notes`.

    Args:
      layout: Its head is placed already: if the head is spread over the stages, the table is phased.
    """
    pipeline = layout.parallel.pipeline
    if pipeline.schedule != UNNAMED:
        return layout
    if not layout.simulated:
        name = PHASED
        why = "in a tick all stages go the same way, without a conditional, which costs a GPU a host round trip"
    elif needs := _needs_phased(layout):
        name, why = PHASED, f"{MIXED} would compute less on simulated devices, but {needs}"
    else:
        from jaxpar.pipeline.tables.price import Times, price

        name, times = MIXED, price(layout.schedule, Times()).work_ratio  # the same for any times of its ops
        why = f"simulated devices share a processor, and {PHASED} computes {times:.2f} x its work, idle cells included"
    parallel = replace(layout.parallel, pipeline=replace(pipeline, schedule=name))
    return with_note(replace(layout, parallel=parallel), f"schedule: {name}: {why}")


def _needs_phased(layout: Layout) -> str:
    """Returns why all stages must run the same kind of op in a tick; "" if they need not."""
    pipeline = layout.parallel.pipeline
    if pipeline.head == "spread":
        return "all stages come to a head that is spread in the same tick"
    if pipeline.weights != "flush":  # the table decides the weights of each forward, and so the losses
        return f'with weights="{pipeline.weights}" the losses of a run depend on its table, so devices do not choose it'
    for axis, size in layout.sizes.items():
        if size > 1 and not AXES[axis].manual:
            return f"collectives over {axis} inside of one stage may wait for other stages, which run another op"
    return ""
