"""
A Triton backend called "cpu", which PyPI's Triton lacks: vLLM's CPU build asks for one before it enables the V2 runner.

Nothing is compiled through it: with `TRITON_INTERPRET=1` every kernel runs in Triton's interpreter. It is found only
where `rankscope_lab.v2.distributions` has put its entry point on the path.
"""
