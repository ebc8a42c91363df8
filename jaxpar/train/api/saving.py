"""`jp.save` and `jp.restore`: a state in a folder, with a hash of every block, restored under any layout."""

from pathlib import Path

from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.checkpoint.listing import LEFT, checkpoint_folder, set_aside, steps
from jaxpar.checkpoint.processes import broadcast, is_first
from jaxpar.errors import refuse
from jaxpar.files import expand_home
from jaxpar.step.checks.input_state import check_not_donated, scalars_to_arrays
from jaxpar.step.state import State
from jaxpar.step.step import Step

FOLDER = "checkpoints"  # inside the run folder
ALL = Checkpoints(keep_last=2**31 - 1)


def save(path: str | Path, state: State, *, replace: bool = False) -> Path:
    """Saves a state; returns its folder, `PATH/checkpoints/000200`, once all of it is on disk.

    `jaxpar checkpoint ls PATH` lists the checkpoints. `save` deletes none of them. With several processes, all must
    call it, and each writes the shards of its own devices.

    Args:
      path: A folder, created if needed; it may be a run folder.
      state: A state as a step returns it.
      replace: Whether to replace a checkpoint of the same step, which is renamed to `000200.left`.

    Raises:
      JaxparError: If a checkpoint of that step exists, the folder cannot be written, or a step has donated the state.
    """
    check_not_donated(state)
    state = scalars_to_arrays(state)
    store, step = Store(expand_home(path, "path") / FOLDER, ALL), int(state.step)
    if broadcast(step in store.steps()):
        if not replace:
            raise refuse(
                f"jp.save: {store.path(step)} is there",
                rule="a checkpoint is not written over",
                fix=f"jp.save({str(path)!r}, state, replace=True), or another path",
            )
        if is_first():
            set_aside(store.path(step), LEFT)
    store.save(step, state, {})
    store.finish()
    return store.path(step)


def restore(path: str | Path, step: Step, *, at: int | None = None) -> State:
    """Restores a saved state; each device reads its own shards.

    The layout of the step may differ from the layout at the save, also in the number of devices.

    Args:
      path: A folder that `save` or a run has written, or one checkpoint in it.
      step: The step that will train the state; its layout and optimizer define the arrays and their shardings.
      at: The step number of the checkpoint; None takes the newest intact one.

    Raises:
      JaxparError: If there is no checkpoint, it is damaged, or it does not fit; the error lists differences by path.
    """
    if not isinstance(step, Step):
        raise refuse(
            f"jp.restore with step={step!r:.60}",
            rule="a state is restored for the step that goes on with it",
            fix="jp.restore(path, jp.train_step(layout, loss, optimizer)), and at=200 for one of several checkpoints",
        )
    folder = checkpoint_folder(expand_home(path, "path"))
    if at is None and folder.name.isdigit() and int(folder.name) in steps(folder.parent):
        folder, at = folder.parent, int(folder.name)
    restored, _ = Store(folder, ALL, is_owner=False).restore(step.abstract(), at)
    return restored
