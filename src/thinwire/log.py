"""Where thinwire says what it does: the logger `thinwire`, on standard error unless the program logs by itself."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("thinwire")


def set_up() -> None:
    """Make INFO visible once: what `attach` decides must not be silent in a script that never configured logging."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[thinwire] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    level = os.environ.get("THINWIRE_LOG", "info").upper()
    logger.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")
