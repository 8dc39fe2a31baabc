"""
Asking exporters, and holding what they said.
"""
