"""The logger `thinwire`: writes to standard error unless the program configures logging."""

import logging
import os

logger = logging.getLogger("thinwire")


def set_up() -> None:
    """Make INFO visible, once, so that the decisions of `attach` appear in scripts that do not configure logging."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[thinwire] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    level = os.environ.get("THINWIRE_LOG", "info").upper()
    logger.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")
