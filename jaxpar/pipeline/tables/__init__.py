"""Schedules as tables: which op each stage runs in each tick, and what follows from that by counting."""
