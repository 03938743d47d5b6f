"""Run folders: written while a run goes, read and summarised without torch."""
