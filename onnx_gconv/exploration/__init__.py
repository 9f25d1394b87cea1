"""Explorations: many budgets, each point a job of its own, done here or on a cluster."""
