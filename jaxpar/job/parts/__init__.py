"""Builds the parts that a job names: model, loss, optimizer, batches, loggers, and the model for the planner."""
