"""
Rankscope's server: polls exporters, aligns ranks by step, finds where they part, and turns the fix on.
"""

__version__ = "0.1.0"
