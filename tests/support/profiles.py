"""How many examples Hypothesis tries: few in `make test`, many in `make test-long` (`--hypothesis-profile large`)."""

from __future__ import annotations

from hypothesis import settings

SMALL, LARGE = "small", "large"
NORMAL = 100
"""What Hypothesis tries by default, and what the numbers in the tests are in proportion to."""

# No deadline: the first call of a kernel compiles it, and a busy machine is no failure.
settings.register_profile(SMALL, max_examples=40, deadline=None)
settings.register_profile(LARGE, max_examples=500, deadline=None)


def tries(count: int) -> int:
    """As many as a test asks for, in proportion to the profile: `@settings(max_examples=tries(300))`."""
    return max(min(count, 5), round(count * settings.default.max_examples / NORMAL))
