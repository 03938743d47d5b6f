"""Charts and pages. Needs no torch."""
