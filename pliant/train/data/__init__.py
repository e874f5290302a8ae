"""The batches of N replicas from one pool of loader processes: which samples, where each replica stands, who loads."""
