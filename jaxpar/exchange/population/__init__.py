"""Populations: members that train in parallel on the same examples, with different optimizer settings.

    population      members that never synchronize: a grid, or random draws; population based training: the worst
                    members copy the best and continue with changed settings
    search_rounds   searches that restart training in each round: `evolution`, `swarm`
    copying         copies members to other members, over the mesh axis
    sweep           a job's `[sweep]`, and the members' initial settings

Settings are arrays [member] in the optimizer's state, so one compiled program trains all members; every device along
`data` has the same number of members. Terms: a member, a setting, a window (the steps between two sync rounds).

To add a search method: a file with a frozen dataclass that is a `Population`, and its name in `Sweep.method`.
"""
