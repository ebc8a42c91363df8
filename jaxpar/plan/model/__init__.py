"""Costs of models: of a decoder by formulas, of any other model by tracing it on shapes."""
