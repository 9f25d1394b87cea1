"""Recovery: calibration data, closed-form reconstruction, and what an end-to-end measurement says of each layer."""
