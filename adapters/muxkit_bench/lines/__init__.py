"""`muxkit bench --rtt`: what protocols make of a long line, in MiB/s and in round trips."""
