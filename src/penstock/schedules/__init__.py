"""The orders people know by name: one file per family, one registry."""
