"""Pipelines in libraries that people train with; a module is imported only where it is used."""
