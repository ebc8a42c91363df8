"""Additional evaluation metrics: functions that map (model, batch) to (sum, count), or functions of the mean loss."""
