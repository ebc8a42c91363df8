"""Populations: members that train side by side on the same examples, with other settings of their optimizer.

    population   members that never meet: a grid, or random draws
    pbt          population based training: the worst copy the best, and go on with other settings
    copied       members become copies of others, over the mesh axis
    sweep        a job's `[sweep]`
    draws        the settings that members begin with

Settings are arrays [member] in the optimizer's state, so one compiled program trains all members, of which each device
along `data` has as many. Nouns: a member, a setting, a window (the steps between two meetings).

To add a way to search: a file with a frozen dataclass that is a `Population`, and its name among `Sweep.method`.
"""
