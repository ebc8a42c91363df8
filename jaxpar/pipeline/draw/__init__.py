"""Tables of schedules, drawn: as text, as SVG to scale, as a thumbnail, and side by side."""
