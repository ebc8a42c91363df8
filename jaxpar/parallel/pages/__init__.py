"""A layout as a picture: the devices of a mesh, the links between them, and the shards that each device stores."""
