"""Exact solutions with a proof, for small problems."""
