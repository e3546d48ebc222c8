"""The schedule families by name: one file per family, one registry."""
