"""Lookup tables that dfloat11 has compressed, shown as the plain tables that they decode to."""
