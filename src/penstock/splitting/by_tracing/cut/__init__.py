"""From one graph to a graph per stage."""
