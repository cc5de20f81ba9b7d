"""Conversion to FTW, and its verification."""
