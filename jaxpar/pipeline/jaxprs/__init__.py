"""jaxprs."""
