"""Jobs as their users have them: files that say what to do, folders that keep what was done, and who minds a job meanwhile."""
