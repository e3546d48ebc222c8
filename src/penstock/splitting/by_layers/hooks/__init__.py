"""Forward hooks in a split model: which stages call them, and with what."""
