"""Draws schedules: as text, as SVG to scale, as a thumbnail, and compared side by side."""
