"""The line on a terminal that says, from the first second on, what a run waits for."""
