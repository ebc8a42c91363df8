"""Measures how long the processes of a run take to notice that one is gone, stopped, late or runs something else.

Real processes on this machine, each with its own simulated devices, connected as they would be on several hosts.
A fault is planted once training goes; the clock runs until the last of the others has ended, with a message that
names the process at fault. What is planted is a signal, another job file, or a module of the user's own that
misbehaves in one process.

    run       the processes of a small run, and what they are told to do otherwise
    planted   each fault, and whether and when it was detected

To add a fault: a function in `planted` that plants it and returns a `Detection`, and a row of `FAULTS`.
"""
