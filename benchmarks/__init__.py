"""Programs that measure, and tables that are published on the pages of the documentation."""
