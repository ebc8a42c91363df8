"""What a user begins with: a folder with a job, and the model, loss, data and test that it names."""
