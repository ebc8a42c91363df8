"""Starts the processes of one job on this machine, watches them, and restarts them after a failure."""
