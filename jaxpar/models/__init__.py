"""Reference models. They know names of dims, never of meshes."""
