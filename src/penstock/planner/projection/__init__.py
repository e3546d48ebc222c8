"""From measured layers on one device to a cluster that is not there yet."""
