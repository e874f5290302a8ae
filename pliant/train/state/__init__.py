"""The state of a job outside of its workers' memory: as JSON and tensors, in files, on its way to newcomers."""
