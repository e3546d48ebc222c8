"""What a checkpoint is made of: its folder, its files, their manifest, and how they are used."""
