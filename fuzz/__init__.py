"""Coverage-guided fuzzing of everything that reads files: `make fuzz`."""
