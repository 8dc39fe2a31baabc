"""
Commands of `rankscope`, one to a module.
"""
