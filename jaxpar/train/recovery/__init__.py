"""Recovery: back to a checkpoint after a bad step, and a checkpoint before an error of the user's code."""
