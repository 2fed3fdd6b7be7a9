"""`muxkit capture`: pages about recorded traffic."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from muxkit.cli.terminal import CommandFailed, Exit, printable

CAPTURE_NEEDS = {"duckdb": "duckdb", "pyarrow": "duckdb", "pyspark": "spark", "pandas": "spark", "numpy": "spark"}
RAW_PROTOCOLS = ("aqueduct", "bpmux", "e3x", "relink", "yamux")  # whose bytes `muxkit.pipeline` can decode
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def capture() -> None:
    """Recorded traffic, as `muxkit.pipeline.Capture` writes it."""


@capture.command()
@click.argument("folder", type=FOLDER)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The page to write. [default: FOLDER/report.html]"
)
@click.option("--raw", type=click.Choice(RAW_PROTOCOLS), help="Decode raw bytes of this protocol.")
@click.option("--engine", is_flag=True, help="With --raw bpmux: find protocol violations with a real engine.")
@click.option("--listener", is_flag=True, help="With --raw relink: the bytes were recorded by the listener.")
@click.option("--since", type=click.DateTime(), help="Skip rows before this time (UTC).")
@click.option("--until", type=click.DateTime(), help="Skip rows from this time on (UTC).")
@click.option("--connection", help="Only the connection with this name.")
@click.option("--spark", "with_spark", is_flag=True, help="Use Spark, for captures that one machine can't hold.")
def report(
    folder: Path,
    out: Path | None,
    raw: str | None,
    engine: bool,
    listener: bool,
    since: datetime | None,
    until: datetime | None,
    connection: str | None,
    with_spark: bool,
) -> int:
    """Write a page about the captures in FOLDER: rates, volumes, credit, round trips, fairness and violations."""
    if engine and raw != "bpmux":
        raise click.UsageError("--engine requires --raw bpmux")
    if listener and raw != "relink":
        raise click.UsageError("--listener requires --raw relink")
    kind = "frames" if raw is None else "raw"
    try:
        from muxkit import pipeline

        only = pipeline.Selection(since=since, until=until, connection=connection)
        if not only.open(folder).files("frames" if raw is None else "raw", only):
            raise CommandFailed(f"{folder / kind}: no captures found", Exit.USAGE)
        how = pipeline.Raw(protocol=raw, engine=engine, side="listener" if listener else "connector") if raw else None
        spark = pipeline.spark_session() if with_spark else None
        try:
            page = pipeline.report(folder, out, raw=how, only=only, spark=spark)
        except pipeline.CaptureError as error:
            raise CommandFailed(printable(str(error))) from error
        finally:
            if spark is not None:
                spark.stop()
    except ModuleNotFoundError as error:
        extra = CAPTURE_NEEDS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sentence = f"captures need {error.name}; it comes with: pip install 'muxkit[{extra}]'"
        raise CommandFailed(sentence, Exit.USAGE) from None
    click.echo(printable(str(page)))
    return Exit.OK
