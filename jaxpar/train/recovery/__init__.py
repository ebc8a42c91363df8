"""Recovery: a rollback to a checkpoint after a bad step, and a save before an error of user code ends the run."""
