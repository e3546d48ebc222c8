"""Messages between ranks of one machine through device memory that both can reach."""
