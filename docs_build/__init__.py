"""What the documentation makes of the package when the site is built."""
