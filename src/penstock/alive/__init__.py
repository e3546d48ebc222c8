"""Which ranks are alive: heartbeats, the failure detector, and the guard around joint calls."""
