"""The oracle: every kernel in plain torch, obviously right, with the names and results of the compiled ones."""
