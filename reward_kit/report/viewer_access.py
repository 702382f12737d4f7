"""Access control of the viewer: requests must come from this machine and need the token of the server.

A page of a different site in the same browser can send requests to this machine and can resolve its host name to this
machine. A request therefore needs the token or the cookie exchanged for it. The browser sends the cookie only for pages
of the viewer. The Host header of a request must name this machine. Only safe methods are allowed, except that a page of
the viewer can POST a label as JSON.

The address passed to a browser is visible to other users of the machine in the process arguments. It therefore contains
a code instead of the token. The code can be exchanged for a cookie only once and within a minute. A second use is
refused and revokes the first cookie, since one of the two clients was not the user's browser.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from urllib.parse import quote, urlsplit

import anyio
from aiohttp import web

TOKEN, CODE = "token", "code"
HERE = ("127.0.0.1", "localhost")
"""Host names of this machine that are accepted."""
_CODE_LASTS_S = 60.0
_COOKIE_LASTS_S = 24 * 3600  # cookies expire because those of many starts would fill the headers
_WITHDRAWN = "This code was used twice; its session is closed. Open the address that was printed.\n"
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
    """Return 256 random bits as URL-safe text."""
    return secrets.token_urlsafe(32)


class Access:
    """The access control of a server. It allows requests or refuses them with a reason.

    Args:
        token: the token expected in addresses as `?token=…`; a new one is created by default.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token or new_token()
        self._due: dict[str, float] = {}
        """Unused codes, and the times at which they expire."""
        self._used: dict[str, str] = {}
        """Used codes, and the sessions that were opened with them."""
        self._sessions: dict[str, set[anyio.CancelScope]] = {}
        """Cookies that were exchanged for codes, and the requests in progress that use them."""
        # Cookies ignore ports, so each start uses its own name.
        self._cookie = f"reward_kit_{secrets.token_hex(4)}"

    def one_time_code(self, lasts_s: float = _CODE_LASTS_S) -> str:
        """Return a code that admits one browser if it is passed as `?code=…` within `lasts_s` seconds."""
        code = new_token()
        self._due[code] = time.monotonic() + lasts_s
        return code

    def install(self, app: web.Application) -> None:
        """Add the access control to all handlers of a server."""

        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._checked(request, handler)

        app.middlewares.append(checked)
        app.on_response_prepare.append(_add_headers)

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        _refuse_foreign(request)
        if CODE in request.query:
            return self._redeemed(request)
        if TOKEN in request.query:
            return self._exchanged(request)
        cookie = request.cookies.get(self._cookie, "")
        if _is_one_of(cookie, (self.token,)):
            return await handler(request)
        if not _is_one_of(cookie, self._sessions):
            raise web.HTTPForbidden(text="Open the address that `reward-kit view` printed: it contains the token.\n")
        with anyio.CancelScope() as scope:
            self._sessions[cookie].add(scope)
            try:
                return await handler(request)
            finally:
                self._sessions.get(cookie, set()).discard(scope)
        raise web.HTTPForbidden(text=_WITHDRAWN)

    def _exchanged(self, request: web.Request) -> web.Response:
        """Exchange the token for a cookie, and redirect to the address without the token.

        The redirect keeps the token out of the browser history.
        """
        if not all(_is_one_of(given, (self.token,)) for given in request.query.getall(TOKEN)):
            raise web.HTTPForbidden(
                text="This token belongs to an earlier `reward-kit view`; open the address that was printed last.\n"
            )
        return self._let_in(request, TOKEN, self.token)

    def _redeemed(self, request: web.Request) -> web.Response:
        """Exchange an unused code for the cookie of a new session."""
        code, *others = request.query.getall(CODE)
        if not others and _is_one_of(code, self._used):
            for answering in self._sessions.pop(self._used[code], set()):
                answering.cancel()
            raise web.HTTPForbidden(text=_WITHDRAWN)
        if others or not _is_one_of(code, self._due) or time.monotonic() >= self._due[code]:
            raise web.HTTPForbidden(text="This code is unknown or expired; open the address that was printed.\n")
        del self._due[code]
        self._used[code] = session = new_token()
        self._sessions[session] = set()
        return self._let_in(request, CODE, session)

    def _let_in(self, request: web.Request, parameter: str, value: str) -> web.Response:
        # Keep exactly one slash: two slashes, or a backslash, would start the name of a different host.
        rest = quote(request.rel_url.without_query_params(parameter).raw_path_qs, safe=_IN_ADDRESSES)
        response = web.Response(status=303, headers={"Location": "/" + rest.lstrip("/")})
        response.set_cookie(self._cookie, value, httponly=True, samesite="Strict", path="/", max_age=_COOKIE_LASTS_S)
        return response


def _is_one_of(given: str, known: Iterable[str]) -> bool:
    """Compare a secret with known ones in constant time."""
    return any(secrets.compare_digest(given.encode("utf-8", "replace"), one.encode()) for one in known)


def _refuse_foreign(request: web.Request) -> None:
    """Refuse requests that are never made by pages of the viewer."""
    is_post = request.method == "POST" and request.match_info.http_exception is None  # of a route that accepts it
    if request.method not in ("GET", "HEAD") and not is_post:
        raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or _name_of(hosts[0]) not in HERE:
        raise web.HTTPForbidden(text="This server accepts only requests to 127.0.0.1 or localhost.\n")
    if not _is_from_here(request.headers, hosts[0], may_follow_links=not is_post):
        raise web.HTTPForbidden(text="Requests from other sites are refused.\n")
    if is_post and request.content_type != "application/json":  # which a form on another site cannot send
        raise web.HTTPUnsupportedMediaType(text="The Content-Type must be application/json.\n")


def _is_from_here(headers: Mapping[str, str], host: str, *, may_follow_links: bool) -> bool:
    """Return True if a request comes from a page of the viewer, the address bar, or a program other than a browser."""
    origin = headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        return False
    # Followed links are admitted, because the linking page cannot read the response and does not have our cookie.
    site, mode = headers.get("Sec-Fetch-Site", "none"), headers.get("Sec-Fetch-Mode", "navigate")
    return site in ("none", "same-origin") or (may_follow_links and mode == "navigate")


def _name_of(host: str) -> str | None:
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname if parts.netloc == host and parts.username is None else None
    except ValueError:
        return None


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add headers that disable caching and restrict every response, including errors, to the viewer."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.pop("Server", None)
