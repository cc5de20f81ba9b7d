"""A table in shared memory that all processes of a user on a host map, filled once."""
