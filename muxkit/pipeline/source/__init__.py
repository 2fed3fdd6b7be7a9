"""The Spark source: planning the content of batches, and reading their rows."""
