"""Staging: transactions of a Spark sink that a server keeps until they are committed."""
