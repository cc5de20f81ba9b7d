"""A repository on the hub as a folder: listed once, its files read by ranges or fetched into the local cache."""
