"""What a job works on: samples as they lie in files, whose each is, and the model. `task` makes all of it of a config alone."""
