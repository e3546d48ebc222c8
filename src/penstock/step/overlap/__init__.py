"""Overlapped actions that really run together: by turns, from turning point to turning point."""
