"""The program of one step, and its rewriting: one flat list of equations with values by number."""
