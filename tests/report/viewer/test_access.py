"""Access control of the viewer: tokens, codes, hosts, origins and paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.report.viewer_access import Access
from reward_kit.report.viewer_runs import RunCatalog
from reward_kit.report.viewer_server import serving
from tests.report.run_factory import episode, make_run, score
from tests.report.viewer.served_viewer import ViewerClient, visiting

PATHS = ["/", "/events", "/run", "/run/", "/run/figures", "/run/events", "/run/search"]
PATHS += ["/run/episode/a", "/run/group/x-p", "/no/such"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path, [episode("a")], [score("a", 1.0)])
    return tmp_path


async def test_token_in_the_url_is_exchanged_for_a_cookie(folder: Path) -> None:
    async with serving(RunCatalog(folder)) as address:
        visitor = ViewerClient(address)
        assert address.startswith("http://127.0.0.1:") and len(visitor.token) >= 43
        answer = await visitor.get(f"/?token={visitor.token}")
        assert (answer.status, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie and "Domain" not in cookie
        page = await (await visitor.enter()).get("/")
        assert page.status == 200 and visitor.token not in page.body and "./run/" in page.body


async def entered_by_code(access: Access, address: str) -> tuple[ViewerClient, str]:
    """Return a client whose browser has redeemed a code, and the path with the code."""
    visitor, path = ViewerClient(address), f"/?code={access.one_time_code()}"
    assert (await visitor.get("/")).status == 403
    answer = await visitor.get(path)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(answer.headers["set-cookie"].split("; "))
    visitor.cookie = answer.headers["set-cookie"].split(";")[0]
    return visitor, path


async def test_access_code_works_only_once(folder: Path) -> None:
    async with serving(RunCatalog(folder), access=(access := Access())) as address:
        visitor, path = await entered_by_code(access, address)
        assert access.token not in visitor.cookie and path.partition("=")[2] not in visitor.cookie
        assert [(await visitor.get(each)).status for each in ("/", "/run/")] == [200, 200]
        again = await ViewerClient(address).get(path)
        assert again.status == 403 and "set-cookie" not in again.headers and "./run/" not in again.body


async def test_second_use_of_an_access_code_revokes_the_first_session(folder: Path) -> None:
    async with serving(RunCatalog(folder), access=(access := Access())) as address:
        thief, path = await entered_by_code(access, address)
        reader, writer = await thief.sent("GET", "/events?since=0")
        await reader.readuntil(b"\r\n\r\n")
        assert (await ViewerClient(address).get(path)).status == 403
        await reader.read()  # the stream ends
        writer.close()
        assert (await thief.get("/")).status == 403
        assert (await (await ViewerClient(address).enter()).get("/")).status == 200


async def test_unknown_expired_and_ambiguous_access_codes_are_rejected(folder: Path) -> None:
    async with serving(RunCatalog(folder), access=(access := Access())) as address:
        visitor = ViewerClient(address)
        late, good = access.one_time_code(lasts_s=0), access.one_time_code()
        for query in ("code=", "code=x", f"code={late}", f"code={good}&code=x", f"code={Access().one_time_code()}"):
            refused = await visitor.get(f"/?{query}")
            assert refused.status == 403 and "set-cookie" not in refused.headers
        assert (await visitor.get(f"/?code={good}", Host="evil.example")).status in (400, 403)
        assert (await visitor.get(f"/?code={good}")).status == 303


@pytest.mark.parametrize("path", PATHS)
async def test_every_path_requires_the_token(folder: Path, path: str) -> None:
    async with visiting(folder) as visitor:
        visitor.cookie, name = "", visitor.cookie.split("=")[0]
        assert (await visitor.get(path)).status == 403
        for guess in ("", "x", visitor.token[:-1], visitor.token + "x", "\xe9"):
            assert (await visitor.get(path, Cookie=f"{name}={guess}")).status == 403
            assert (await visitor.get(path, Cookie=f"other={visitor.token}")).status == 403
        for query in ("token=", "token=x", f"token=x&token={visitor.token}", f"token={visitor.token[:-1]}"):
            refused = await visitor.get(f"{path}?{query}")
            assert refused.status == 403 and "set-cookie" not in refused.headers


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "0.0.0.0:{port}",
        "",
        "user@localhost",
    ],
)
async def test_foreign_host_header_is_rejected_despite_a_valid_cookie(folder: Path, host: str) -> None:
    async with visiting(folder) as visitor:
        for path in PATHS:
            assert (await visitor.get(path, Host=host.format(port=visitor.port))).status in (400, 403)
        refused = await visitor.get(f"/?token={visitor.token}", Host=host.format(port=visitor.port))
        assert refused.status in (400, 403) and "set-cookie" not in refused.headers


async def test_missing_and_duplicate_host_headers_are_rejected(folder: Path) -> None:
    async with visiting(folder) as visitor:
        assert (await visitor.get("/", Host=None)).status in (400, 403)
        assert (await visitor.get("/", host="evil.example")).status in (400, 403)


async def test_localhost_with_any_port_is_accepted(folder: Path) -> None:
    async with visiting(folder) as visitor:
        for host in (f"localhost:{visitor.port}", "localhost:9000", "127.0.0.1:1", "LOCALHOST"):
            assert (await visitor.get("/", Host=host)).status == 200


async def test_cross_origin_requests_are_rejected(folder: Path) -> None:
    async with visiting(folder) as visitor:
        for origin in ("http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"):
            assert (await visitor.get("/run/episode/a", Origin=origin)).status == 403
        for site in ("cross-site", "same-site"):
            given = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": "no-cors"}
            assert (await visitor.get("/run/episode/a", **given)).status == 403
        own = {"Origin": f"http://{visitor.host}", "Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}
        answer = await visitor.get("/run/episode/a", **own)
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_only_get_and_head_are_allowed(folder: Path, method: str) -> None:
    async with visiting(folder) as visitor:
        for path in PATHS:
            answer = await visitor.ask(method, path, Content_Length="0")
            assert answer.status == 405 and answer.headers["allow"] == "GET,HEAD"


@pytest.mark.parametrize("path", [*PATHS, "/?token=x", "/run/no"])
async def test_responses_have_security_headers_and_are_not_cached(folder: Path, path: str) -> None:
    async with visiting(folder) as visitor:
        answer = await visitor.ask("HEAD" if path.endswith("events") else "GET", path)
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "server" not in answer.headers


async def test_token_redirect_stays_on_the_server(folder: Path) -> None:
    async with visiting(folder) as visitor:
        for path in ("//evil.example/", "/\\evil.example", "//evil.example", "http://evil.example/"):
            answer = await visitor.get(f"{path}?token={visitor.token}", Cookie=None)
            location = answer.headers.get("location", "/")
            assert location.startswith("/") and not location.startswith(("//", "/\\"))


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2f..", "%2e%2e%2fsecret", "run%2f..%2f..%2fsecret", "run%00", "%5c..%5csecret", "."]
)
async def test_run_name_cannot_escape_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "runs").mkdir()
    make_run(tmp_path / "runs", [], [])
    (tmp_path / "secret").mkdir()
    make_run(tmp_path / "secret", [episode("classified")], [])
    (tmp_path / "secret" / "run.json").write_text((tmp_path / "secret" / "run" / "run.json").read_text())
    async with visiting(tmp_path / "runs") as visitor:
        for path in (f"/{name}/", f"/{name}/figures", f"/{name}/episode/classified", f"/{name}/run/"):
            answer = await visitor.get(path)
            assert answer.status in (400, 404) and "classified" not in answer.body


async def test_symlinks_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "outside").mkdir()
    outside = make_run(tmp_path / "outside", [episode("classified")], [score("classified", 1.0)])
    own = make_run(tmp_path / "runs", [], [])
    (tmp_path / "runs" / "linked").symlink_to(outside)
    (own / "episodes.jsonl").unlink()
    (own / "episodes.jsonl").symlink_to(outside / "episodes.jsonl")
    async with visiting(tmp_path / "runs") as visitor:
        for path in ("/linked/", "/linked/episode/classified", "/run/", "/run/figures", "/run/episode/classified"):
            assert (await visitor.get(path)).status == 404
        assert "outside" not in (await visitor.get("/")).body


@pytest.mark.parametrize("linked", ["episodes", "episodes/update-000001.jsonl", "summary.json", "metrics.jsonl"])
async def test_training_pages_do_not_follow_symlinks_out_of_the_folder(tmp_path: Path, linked: str) -> None:
    (tmp_path / "runs").mkdir()
    own, outside = make_run(tmp_path / "runs", [], [], training={"train_path": "x"}), tmp_path / "outside"
    messages = [{"role": "user", "content": "classified"}]
    for folder in (own, outside):
        (folder / "episodes").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"update": 1}\n')
        (folder / "summary.json").write_text('{"stopped": "classified"}')
        (folder / "episodes/update-000001.jsonl").write_text(json.dumps(episode("a", messages=messages)) + "\n")
    async with visiting(tmp_path / "runs") as visitor:
        assert "classified" in (await visitor.get("/run/")).body
        (own / linked).rename(own / "before")
        (own / linked).symlink_to(outside / linked)
        for path in ("/run/", "/run/figures"):
            answer = await visitor.get(path)
            assert answer.status == 404 and "classified" not in answer.body


async def test_circular_symlink_does_not_hide_other_runs(folder: Path) -> None:
    make_run(folder / "run", [], []).rename(folder / "broken")
    (folder / "circle").symlink_to("circle")
    (folder / "broken" / "metrics.jsonl").symlink_to("metrics.jsonl")
    async with visiting(folder) as visitor:
        assert "./run/" in (await visitor.get("/")).body


async def test_symlink_within_the_folder_is_listed_as_a_run(folder: Path) -> None:
    (folder / "again").symlink_to(folder / "run")
    async with visiting(folder) as visitor:
        assert (await visitor.get("/again/")).status == 200


async def test_occupied_port_is_reported(folder: Path) -> None:
    async with visiting(folder) as visitor:
        with pytest.raises(ConfigError, match=rf"--port {visitor.port}: .*; choose another"):
            async with serving(RunCatalog(folder), visitor.port):
                pass


LABEL = {"rollout_id": "a", "label": "pass"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": None, "Sec_Fetch_Site": None, "Sec_Fetch_Mode": None}, 200),  # not a browser
        ({"Cookie": None}, 403),
        ({"Cookie": "reward_kit_00000000=x"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}, 403),
        ({"Origin": None, "Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "navigate"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
async def test_only_own_pages_post_a_label(folder: Path, headers: dict[str, str | None], status: int) -> None:
    async with visiting(folder) as visitor:
        answer = await visitor.post("/run/labels", LABEL, **headers)
        assert answer.status == status
        assert (folder / "run" / "labels.jsonl").exists() == (status == 200)


@pytest.mark.parametrize("name", ["../run", "..%2Frun", "nosuch", "out"])
async def test_label_of_a_run_outside_the_folder_is_not_written(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    outside = make_run(tmp_path, [episode("a")], [])
    (inside / "out").symlink_to(outside)
    async with visiting(inside) as visitor:
        answer = await visitor.post(f"/{name}/labels", LABEL)
        assert answer.status in (404, 405)
    assert not (outside / "labels.jsonl").exists()


async def test_label_is_not_written_through_a_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    run = make_run(tmp_path / "in", [episode("a")], [])
    (run / "labels.jsonl").symlink_to(tmp_path / "target")
    async with visiting(tmp_path / "in") as visitor:
        assert (await visitor.post("/run/labels", LABEL)).status == 404
    assert not (tmp_path / "target").exists()
