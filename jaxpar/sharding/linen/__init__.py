"""The variables of Flax Linen modules, between Linen's own trees and those of jaxpar.

    variables    what a module's initializer makes, in boxes, and how jaxpar keeps it
    parameters   what a module reads by name, gathered and cast there
    sow          what it sows, apart from its state
    late         variables that it makes too late

`linen_model.py` beside this calls the module with them.
"""
