"""The playground: one page in which schedules are priced, played, changed and checked."""
