"""The parts of a job: its model, its batches, and its model as a plan sees it."""
