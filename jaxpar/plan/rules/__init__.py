"""Published rules of thumb, as data and formulas, beside what the cost model says."""
