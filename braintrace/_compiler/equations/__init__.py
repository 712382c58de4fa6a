"""One equation of a step: what it is, how it moves elements, which positions meet in it."""
