"""kopf storages that store nothing.

kopf's change handlers compare an object with its stored copy and resume from stored progress. Event handlers need
neither, and storing a copy of each object would be most of the operator's work.
"""

from __future__ import annotations

from typing import Any

import kopf


class NullDiffBaseStorage(kopf.DiffBaseStorage):
    """Reports no differences."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


class NullProgressStorage(kopf.ProgressStorage):
    """Stores no progress."""

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
