"""Published measurements beside what the simulator predicts for them; see docs/published.md."""
