"""Captures of traffic: recording, decoding, analysis and the report."""
