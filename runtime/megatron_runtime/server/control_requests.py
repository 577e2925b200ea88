"""What the routes that control the service have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request

from megatron_runtime.errors import CoordinatorError, InvalidStateError, TransitionTimeoutError
from megatron_runtime.server.cross_origin import is_cross_origin
from megatron_runtime.server.errors import ApiError, unavailable


def refuse_cross_origin(request: Request) -> None:
    """Raise ApiError (403) for a request of a page from elsewhere. Browsers send a POST without a body for any page,
    and only hide the answer from it."""
    if is_cross_origin(request.headers):
        raise ApiError(403, "pages from elsewhere can't control the service", code="cross_origin")


async def control(request: Request, act: Callable[[], Awaitable[None]]) -> None:
    """Wait until the engines have done it; ApiError if they can't. The client sends a signal as soon as ``act`` is
    called."""
    refuse_cross_origin(request)
    try:
        await act()
    except InvalidStateError as error:
        raise ApiError(409, str(error), code="invalid_state") from error
    except (TransitionTimeoutError, CoordinatorError) as error:
        raise unavailable(str(error), retry_after=5) from error
