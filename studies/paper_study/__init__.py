"""The parts of `paper_tables.py`: stages, what they found, claims, pages."""
