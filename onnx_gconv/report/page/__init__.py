"""The HTML page: from the files that the other commands have written to one file that a browser shows."""
