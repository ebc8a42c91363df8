"""The job file: its schema, parsing and writing, comparison with earlier jobs, and the Python objects it names."""
