"""Pumps: a reader, a writer and a clock that run an engine on a link, one pump for each kind of link."""
