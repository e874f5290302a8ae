"""Who is in a job: the view that is wanted, the roll of those who train, and one worker as a member of it. No training here."""
