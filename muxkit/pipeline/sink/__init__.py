"""The Spark sink: rows of a query go to a staging server."""
