"""Take the TTFT of timed trials apart by the engine's counters."""

from pathlib import Path

from kvladder.timeline.trials import table

found = table(Path(path).parent for path in snakemake.input.trials)
found.write_parquet(snakemake.output.parquet[0], compression="zstd", statistics=False)
found.write_csv(snakemake.output.csv[0])
