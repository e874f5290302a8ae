"""The workers of a job: the view that is wanted, the membership of those that train, and one worker as a member. No training here."""
