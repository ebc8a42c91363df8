"""Draws a layout: the devices of a mesh, the links between them, and the shards on each device."""
