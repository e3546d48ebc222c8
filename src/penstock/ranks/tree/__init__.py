"""The control plane as a tree of connections: its shape, who is let in, and exchanges along it."""
