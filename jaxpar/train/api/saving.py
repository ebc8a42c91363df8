"""A state in a folder: saved with the hash of every block, restored under any layout."""

from pathlib import Path

from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.checkpoint.listing import LEFT, checkpoint_folder, set_aside, steps
from jaxpar.checkpoint.processes import broadcast, is_first
from jaxpar.errors import refuse
from jaxpar.step.checks.input_state import check_not_donated, scalars_to_arrays
from jaxpar.step.state import State
from jaxpar.step.step import Step

FOLDER = "checkpoints"  # of a run
ALL = Checkpoints(keep_last=2**31 - 1)


def save(path: str | Path, state: State, *, replace: bool = False) -> Path:
    """Saves a state, and returns its folder, `PATH/checkpoints/000200`, when all of it is on the disk.

    `jaxpar checkpoint ls PATH` lists what is there. Nothing in the folder is deleted. With several processes all of
    them call it, and each writes what its devices hold.

    Args:
      path: A folder, which is made; that of a run too.
      state: As a step returns it.
      replace: Whether it takes the place of a checkpoint of the same step, which is set aside as `000200.left`.

    Raises:
      JaxparError: If there is a checkpoint of that step, it cannot be written, or a step has taken the state over.
    """
    check_not_donated(state)
    state = scalars_to_arrays(state)
    store, step = Store(Path(path) / FOLDER, ALL), int(state.step)
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
    """Returns a saved state, every array read by the devices that keep it.

    The layout of the step may be another than that of the save, on another number of devices.

    Args:
      path: A folder that `save` or a run has written, or one checkpoint in it.
      step: The step that goes on with it: its layout and optimizer say what the state is, and where.
      at: Which step's checkpoint; None is the newest good one.

    Raises:
      JaxparError: If there is none, it is damaged, or it does not fit: every difference by path.
    """
    if not isinstance(step, Step):
        raise refuse(
            f"jp.restore with step={step!r:.60}",
            rule="a state is restored for the step that goes on with it",
            fix="jp.restore(path, jp.train_step(layout, loss, optimizer)), and at=200 for one of several checkpoints",
        )
    folder = checkpoint_folder(Path(path))
    if at is None and folder.name.isdigit() and int(folder.name) in steps(folder.parent):
        folder, at = folder.parent, int(folder.name)
    restored, _ = Store(folder, ALL, is_owner=False).restore(step.abstract(), at)
    return restored
