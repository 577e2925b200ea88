"""kopf's memory of objects, without anything in it.

It is for handlers of changes, which compare an object with its former self, and go on where they were. Handlers of
events need neither, and copying each object to find its changes would be most of the operator's work.
"""

from __future__ import annotations

from typing import Any

import kopf


class NullDiffBaseStorage(kopf.DiffBaseStorage):
    """Objects never differ from what they were."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


class NullProgressStorage(kopf.ProgressStorage):
    """Nothing was begun."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass

    def purge(self, **_: Any) -> None:
        pass

    def touch(self, **_: Any) -> None:
        pass

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
