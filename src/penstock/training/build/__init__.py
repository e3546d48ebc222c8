"""What happens when a pipeline is built: devices, membership, agreement, seeds."""
