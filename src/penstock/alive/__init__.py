"""Who is alive: heartbeats, the failure detector, and the guard around every joint call."""
