"""Models are made once in a session."""

from tests.roles.kit import models

__all__ = ["models"]
