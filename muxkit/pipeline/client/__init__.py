"""Requests to restream servers, without Spark."""
