"""Rows of a batch: whole documents padded to one length, token files, and mixtures of several sets by weight."""
