"""The engine: layout, scheduling, execution, per-rank state, recording and checkpoints of an exchange."""
