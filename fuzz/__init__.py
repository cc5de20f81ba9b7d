"""Fuzzing of what ftw reads: seeds, structure-aware mutations, an oracle, a guided driver; see README.md."""
