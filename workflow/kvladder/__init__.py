"""Measure, judge and explain KV-cache tiers of vLLM servers.

The library never imports snakemake; the rules in ``workflow/rules`` call it through thin scripts.
"""

__version__ = "0.1.0"
