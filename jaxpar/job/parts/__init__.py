"""What a job is made of: its model, its batches, and its model as a plan sees it."""
