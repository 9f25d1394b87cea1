"""The command line: argv -> one call -> files and exit code."""
