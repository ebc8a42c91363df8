"""Schedules as tables of ops per stage and tick; bubble, memory and messages are counted in the table."""
