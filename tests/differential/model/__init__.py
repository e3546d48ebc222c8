"""What a random model is made of: layers, products, oddities, and the parts they make."""
