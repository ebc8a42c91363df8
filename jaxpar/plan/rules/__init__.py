"""Published rules of thumb, as data and formulas, compared with the cost model."""
