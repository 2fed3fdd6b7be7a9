"""The Spark source: what a batch holds, and its rows."""
