"""Torch's schedule classes: an order bound to the stages of this rank."""
