"""Verbs that train a job (in one process, in several, or as a population) and report on a run."""
