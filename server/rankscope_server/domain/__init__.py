"""
What Rankscope knows and decides, as values and pure functions: no clock, no network, no database.
"""
