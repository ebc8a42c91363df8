"""Verbs, one file each: parse, call one room, print."""
