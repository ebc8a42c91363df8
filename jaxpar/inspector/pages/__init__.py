"""Shows the facts of a report: as text, as one HTML page, and as drawings."""
