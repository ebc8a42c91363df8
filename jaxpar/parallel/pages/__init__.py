"""A layout as a picture: the devices of a mesh, what joins them, and which of them holds which piece of what."""
