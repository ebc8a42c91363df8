"""The file of a job: its schema, how it is parsed and written, what changed in it, and the objects it names."""
