"""Small models, a text, and ready-made runs of them on this machine: what verify and demo use."""
