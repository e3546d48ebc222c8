"""Formats on disk: timelines, traces and flight records, read strictly."""
