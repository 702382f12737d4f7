"""Who may read: whoever has the token of this start, from this machine, and from no page of another site.

A page that somebody opens in the same browser can send requests to this machine too, and can make a name of its own
point to it. So a request needs the token, or the cookie that the token was exchanged for, which the browser sends for
our own pages alone; its Host has to be this machine; and what it may do is read.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import quote, urlsplit

from aiohttp import web

TOKEN = "token"
HERE = ("127.0.0.1", "localhost")
"""The names under which this machine may be asked for."""

_COOKIE_LASTS_S = 24 * 3600  # or those of many starts would fill the header of every request
_IN_ADDRESSES = "/?&=%:@!$'()*+,;~"

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def new_token() -> str:
    """256 bits that nobody guesses, fit for an address."""
    return secrets.token_urlsafe(32)


class Access:
    """Lets requests in, or says why not.

    Args:
        token: what an address has to carry, as `?token=…`.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        # Cookies know no ports, so each start has a name of its own and does not overwrite another's.
        self._cookie = f"reward_kit_{secrets.token_hex(4)}"

    def install(self, app: web.Application) -> None:
        """Put itself before every handler of a server."""

        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._checked(request, handler)

        app.middlewares.append(checked)
        app.on_response_prepare.append(_add_headers)

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        _refuse_strangers(request)
        if TOKEN in request.query:
            return self._exchanged(request)
        if not self._is_token(request.cookies.get(self._cookie, "")):
            raise web.HTTPForbidden(text="Open the address that `reward-kit view` printed: it carries the token.\n")
        return await handler(request)

    def _exchanged(self, request: web.Request) -> web.Response:
        """The cookie for the token, and the address without it, so that no history and no bookmark keeps it."""
        if not all(map(self._is_token, request.query.getall(TOKEN))):
            raise web.HTTPForbidden(text="This token is of another start of `reward-kit view`; use the one printed.\n")
        # One slash alone: two of them, or a backslash, would begin the name of another host.
        rest = quote(request.rel_url.without_query_params(TOKEN).raw_path_qs, safe=_IN_ADDRESSES)
        response = web.Response(status=303, headers={"Location": "/" + rest.lstrip("/")})
        response.set_cookie(
            self._cookie, self._token, httponly=True, samesite="Strict", path="/", max_age=_COOKIE_LASTS_S
        )
        return response

    def _is_token(self, given: str) -> bool:
        """Whether it is the token, in a time that does not tell how much of it is right."""
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _refuse_strangers(request: web.Request) -> None:
    """What no page and no address of ours asks.

    Raises:
        HTTPMethodNotAllowed: it is to change something.
        HTTPForbidden: it is for another host, or from another site.
    """
    if request.method not in ("GET", "HEAD"):
        raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or _name_of(hosts[0]) not in HERE:
        raise web.HTTPForbidden(text="This server is asked for by 127.0.0.1 or localhost alone.\n")
    if not _is_from_here(request.headers, hosts[0]):
        raise web.HTTPForbidden(text="Pages of other sites may not ask this server.\n")


def _is_from_here(headers: Mapping[str, str], host: str) -> bool:
    """Whether a request is of a page of ours, of the address line, or of a program that is no browser."""
    origin = headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        return False
    # A link that was followed is let through: its page cannot read what it opens, and has no cookie of ours.
    site, mode = headers.get("Sec-Fetch-Site", "none"), headers.get("Sec-Fetch-Mode", "navigate")
    return site in ("none", "same-origin") or mode == "navigate"


def _name_of(host: str) -> str | None:
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname if parts.netloc == host and parts.username is None else None
    except ValueError:
        return None


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer, errors and streams among them, is for our own pages alone and is kept nowhere."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.pop("Server", None)
