"""Records of calls of units: what they returned, in the form in which stages send it."""
