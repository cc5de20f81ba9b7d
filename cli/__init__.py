"""The command line: one file for each command, installed as `ftw.cli`."""
