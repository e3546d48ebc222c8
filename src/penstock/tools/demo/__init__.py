"""The demo: a small GPT is measured, planned, trained and compared."""
