"""Telling people: tables and report.json."""
