"""Models as a plan sees them: a decoder by formulas, any other traced on shapes."""
