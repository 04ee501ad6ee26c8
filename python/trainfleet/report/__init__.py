"""Seeing a run: the live line, the plots, the one-page report and the closing summary; all read the run folder only."""
