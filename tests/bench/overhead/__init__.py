"""What jaxpar's step costs beside steps written by hand in raw JAX.

    against_twin     the same program by hand (`bench/twin.py`): the overhead of the framework itself
    against_expert   the same model as an expert would write it (`bench/expert.py`): what a user gives away
    ours             the sides that are declared with jaxpar
    program          what XLA made of a step: temporary memory, launches of collectives, bytes on the wire

To add a layout: a row of `LAYOUTS`. The steps written by hand are yardsticks: they follow nothing that jaxpar does.
"""
