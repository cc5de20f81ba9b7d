"""Headers that nobody would write, drawn: ftw's answer to each is that of other code, or a difference that is listed."""
