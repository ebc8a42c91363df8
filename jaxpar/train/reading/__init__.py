"""Batches are read while steps are computed, and what a step waited for its batch is measured.

data.ahead = 0     the batch of a step is read while devices compute the step before
data.ahead = 4     a thread reads on, up to four batches ahead: a slow one delays nothing that four steps make up for
"""
