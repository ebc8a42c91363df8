"""The parts of a job: names and settings of its model, what runs under them, its batches, its model to be planned."""
