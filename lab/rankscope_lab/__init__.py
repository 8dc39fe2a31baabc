"""
Real vLLM engines on a CPU in which pipeline ranks drift apart: environment, checkpoints, relay, engine, traffic.
"""
