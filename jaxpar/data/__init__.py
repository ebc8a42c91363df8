"""Real input: every batch a pure function of the step, so that a run resumes from a number."""
