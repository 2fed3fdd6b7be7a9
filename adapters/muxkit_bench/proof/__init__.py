"""The proof that the pipeline loses nothing: servers and a Spark query, killed and counted."""
