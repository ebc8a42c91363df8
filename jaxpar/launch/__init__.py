"""Starts the processes of one job, watches them, and starts them again."""
