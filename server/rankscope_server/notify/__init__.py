"""
Receivers of notifications.
"""
