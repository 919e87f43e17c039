"""Models are made once in a session."""

from tests.roles.tiny_roles import models

__all__ = ["models"]
