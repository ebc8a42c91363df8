"""Converts a batch of numbers of any kind to arrays on the devices of a layout."""
