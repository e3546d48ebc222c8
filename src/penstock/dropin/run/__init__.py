"""A step of torch's classes on the one executor and transport."""
