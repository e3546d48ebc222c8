"""Actions and orders of actions under torch's names: text, files, passes, checks."""
