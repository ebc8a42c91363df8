"""Converts the variables of Flax Linen modules between Linen's trees and those of jaxpar.

    variables    the boxed variables of a module's initializer, and jaxpar's nested dicts of them
    parameters   gathers and casts parameters where a module reads them by name
    streams      random streams that a module draws from, and values that it sows

`linen_model.py` calls the module with them.
"""
