"""`jaxpar new`: a starter folder with a job, and the model, loss, data and test that it names."""
