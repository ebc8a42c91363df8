"""Shows a plan: as text, as one HTML page, as bars, and time against memory."""
