"""
The failure class as cases: what public reports describe, made with data of our own, and the verdict that each must get.
"""

import cases_batches
import cases_guards
import cases_lengths
import cases_losses
import cases_stalls

CASES = (
    *cases_lengths.CASES,
    *cases_guards.CASES,
    *cases_batches.CASES,
    *cases_stalls.CASES,
    *cases_losses.CASES,
)
