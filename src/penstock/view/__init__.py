"""Pictures of timelines: for the terminal, for papers, for the browser, for trace viewers."""
