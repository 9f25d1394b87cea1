"""The user's data: read in batches, checked against the model's inputs."""
