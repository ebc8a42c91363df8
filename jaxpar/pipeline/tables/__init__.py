"""Schedules as tables: the op of each stage in each tick; bubble, memory and messages follow by counting."""
