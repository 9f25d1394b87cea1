"""Finding, for one layer and one number of groups, which channels belong together. NumPy and SciPy only."""
