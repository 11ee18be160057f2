"""One file a figure: a pure function, tables in, matplotlib figure out.

Each module has ``NAME`` (file name), ``TITLE``, ``CAPTION`` (plain text), ``CATEGORY`` and ``draw(tables, width)``,
width in inches. A figure that concerns only experiments of some kind has ``applies(tables)`` as well: the report
leaves it out where that is False. What they share is in `parts`.
"""
