"""Checks of this machine before a run depends on it: each returns findings, and none can hang."""
