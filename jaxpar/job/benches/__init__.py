"""What `jaxpar bench` measures or compiles of jobs: their layers, their communication, the planner beside them."""
