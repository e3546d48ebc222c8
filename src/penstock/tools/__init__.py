"""Programs built on the library: verify, demo, soak, and the launcher of local processes."""
