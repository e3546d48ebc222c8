"""Proof before work: is a schedule complete and consistent, and will it finish?"""
