"""What a plan asks of a model, and the two that answer: a decoder by formulas, any other traced on shapes."""
