"""What a program does, observed."""
