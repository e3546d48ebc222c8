"""The interactive HTML page: the Python that fills it in, and the scripts that draw it."""
