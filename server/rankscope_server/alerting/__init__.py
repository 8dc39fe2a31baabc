"""
Alerts: their life, and that their receivers hear of it.
"""
