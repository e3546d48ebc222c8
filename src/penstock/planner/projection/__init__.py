"""From measured layers on one device to a cluster that you do not have yet."""
