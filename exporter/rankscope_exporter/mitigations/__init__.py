"""
What Rankscope can change in a running vLLM, one module per mitigation.
"""
