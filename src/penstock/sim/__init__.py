"""Pricing: from a schedule and costs to a timeline, and why it is as long as it is."""
