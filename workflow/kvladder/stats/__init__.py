"""Statistics whose unit is the trial: medians with intervals, paired ratios, the noise floor, two modes.

One file a question; every helper's docstring gives its formula. Values keep the unit they came in.
"""
