"""What a user sees while a command runs."""
