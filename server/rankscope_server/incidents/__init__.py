"""
Incidents: what belongs together, its evidence, and its exports.
"""
