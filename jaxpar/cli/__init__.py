"""Verbs, one file each: parse, call one room, print.

To add a flag: an argument of its verb's file; what it does belongs to the room that the verb calls.
"""
