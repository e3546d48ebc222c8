"""The heartbeat as a tree: one rank's place in it, whom it looks for, and what rank 0 knows."""
