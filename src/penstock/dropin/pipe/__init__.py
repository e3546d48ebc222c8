"""Traced models in the form that torch gives them."""
