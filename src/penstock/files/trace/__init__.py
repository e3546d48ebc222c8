"""Trace files of viewers and of torch's profiler, read into timelines."""
