"""Training loops of others on a job of ours. Each module needs an extra of its own, and none imports another."""
