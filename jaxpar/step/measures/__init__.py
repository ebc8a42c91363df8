"""Additional evaluation metrics: functions of (model, batch) to (sum, count), or of the mean loss."""
