"""Starting a job: the runner of each host, on this machine, over ssh or on Ray; nothing that it started outlives it."""
