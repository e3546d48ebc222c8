"""The rows of a schedule as a program: their calls, their messages, and what is left of them."""
