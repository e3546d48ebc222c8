"""`penstock demo`, part by part."""
