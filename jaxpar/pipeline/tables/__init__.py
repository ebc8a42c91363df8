"""Schedules as tables: the op of each stage in each tick. Bubble, memory and messages are counted from the table."""
