"""Verbs that train a job, alone, by several processes, or as many members of a population, and show the run."""
