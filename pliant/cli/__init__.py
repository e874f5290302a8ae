"""The command line: one file for each command, which reads its flags, calls the part that does the work, and prints."""
