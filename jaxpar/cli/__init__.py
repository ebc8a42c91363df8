"""Verbs, one file each: parse, call one room, print.

To add a flag: an argument in its verb's file; its effect belongs into the room that the verb calls.
"""
