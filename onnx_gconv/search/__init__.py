"""Choosing one number of groups per layer. NumPy and SciPy only: costs come in as a table, a choice goes out."""
