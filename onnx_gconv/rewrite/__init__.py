"""Carrying out a plan: the masked dense model, and the grouped one. Model and plan in, new model out."""
