"""What the user declares, and what follows from it."""
