"""The hall: a job file gathers each room's own spec, and `build` walks through the rooms."""
