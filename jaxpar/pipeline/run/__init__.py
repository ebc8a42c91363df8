"""Runs a table inside one compiled program, as loops over ticks in which stages compute and send messages."""
