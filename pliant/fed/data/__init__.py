"""The data of a federated job: samples as they lie in files, the client of each, and the model."""
