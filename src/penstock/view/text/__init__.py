"""Pictures and tables for the terminal, as text and Rich renderables."""
