"""
Why saved files cannot be replayed.
"""


class ReplayError(Exception):
    """
    Input that cannot be used; the message says why, and what to do about it.
    """
