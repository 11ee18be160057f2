"""One file a figure: a pure function, tables in, matplotlib figure out.

Each module has ``NAME`` (file name), ``TITLE``, ``CAPTION`` (plain text), ``CATEGORY`` and ``draw(tables, width)``,
width in inches. Modules whose name begins with an underscore are shared parts.
"""
