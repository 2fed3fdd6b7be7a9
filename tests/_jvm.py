"""The options of a Java that lives for a minute, as that of a test does: half the time of the cores.

The second compiler pays off in programs that run for long, and so do collectors of garbage with many threads.
"""

from typing import Final

QUICK: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For `SPARK_SUBMIT_OPTS`, from which Spark's launcher takes the options of a driver."""
