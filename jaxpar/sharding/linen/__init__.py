"""The variables of Flax Linen modules, between Linen's own trees and those of jaxpar.

    variables    the boxed variables of a module's initializer, and jaxpar's form of them
    parameters   parameters that are gathered and cast where a module reads them by name
    sow          sown values, separate from the state
    late         variables that a module makes too late

`linen_model.py` calls the module with them.
"""
