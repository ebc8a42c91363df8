"""What an evaluation says beside the loss: functions of (model, batch) to (sum, count), or of the mean loss alone."""
