"""`muxkit capture`: a report about recorded traffic, without a JVM unless Spark is asked for."""

from __future__ import annotations

from pathlib import Path

import click

from muxkit.cli.outcome import CommandFailed, Exit
from muxkit.cli.terminal import printable

EXTRA = ("pyarrow", "pyspark", "pandas", "numpy")
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def capture() -> None:
    """Recorded traffic, as `muxkit.pipeline.Capture` writes it."""


@capture.command()
@click.argument("folder", type=FOLDER)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The page. [default: FOLDER/report.html]")
@click.option("--raw", type=click.Choice(["bpmux", "relink"]), help="Decode raw bytes of this protocol.")
@click.option("--engine", is_flag=True, help="With --raw bpmux: find the rules that peers broke, with a real engine.")
@click.option("--listener", is_flag=True, help="With --raw relink: the bytes were recorded by the listener.")
@click.option("--spark", "with_spark", is_flag=True, help="Use Spark, for more data than this process can hold.")
def report(folder: Path, out: Path | None, raw: str | None, engine: bool, listener: bool, with_spark: bool) -> int:
    """Write one page about the captures in FOLDER: rates, volumes, credit, round trips, fairness, violations."""
    if engine and raw != "bpmux":
        raise click.UsageError("--engine goes with --raw bpmux")
    if listener and raw != "relink":
        raise click.UsageError("--listener goes with --raw relink")
    kind = "frames" if raw is None else "raw"
    if not any((folder / kind).glob("[!.]*.parquet")):
        raise CommandFailed(f"{folder / kind}: there are no captures", Exit.USAGE)
    try:
        from muxkit import pipeline

        how = pipeline.Raw(protocol=raw, engine=engine, side="listener" if listener else "connector") if raw else None
        spark = pipeline.spark_session() if with_spark else None
        try:
            page = pipeline.report(folder, out, raw=how, spark=spark)
        finally:
            if spark is not None:
                spark.stop()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        sentence = f"captures need {error.name}; it comes with: pip install 'muxkit[spark]'"
        raise CommandFailed(sentence, Exit.USAGE) from None
    click.echo(printable(str(page)))
    return Exit.OK
