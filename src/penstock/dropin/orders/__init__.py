"""Orders of torch's schedules: the tables themselves, with idle slots, and dry runs of them."""
