"""All collectives of one rank in one view: what frames and submissions mean. No sockets of its own, no threads."""
