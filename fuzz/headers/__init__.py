"""Headers that nobody would write, drawn: ftw answers as other code does, or differs in a way that is listed."""
