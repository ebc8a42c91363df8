"""Checks of this machine before a run: every check returns findings, and none can hang."""
