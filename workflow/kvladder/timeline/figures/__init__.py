"""One file a figure of timelines: ``draw`` takes `kvladder.timeline.tables.Tables` and a width in inches."""
