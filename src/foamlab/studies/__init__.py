"""Measurements of their own: step times, predictions held against real steps, memory, convergence."""
