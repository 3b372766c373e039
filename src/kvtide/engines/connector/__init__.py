"""The two halves of an engine of several processes, below any engine: a scheduler that decides, workers that move."""
