"""What holds for any module: whether it is compiled, and how to run it without a trace."""
