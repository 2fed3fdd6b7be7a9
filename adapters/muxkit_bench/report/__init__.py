"""The results of a run: figures, targets, the table and the page."""
