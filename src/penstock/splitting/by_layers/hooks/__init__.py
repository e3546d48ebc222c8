"""Forward hooks in a split model: whose they are, and how each stage calls them."""
