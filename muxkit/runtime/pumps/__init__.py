"""Pumps, which run an engine on a link. Each kind of link has its own pump with a reader, a writer and a clock."""
