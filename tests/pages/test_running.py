"""The page runner accepts correct pages and rejects incorrect ones."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.pages.matching import difference
from tests.pages.parts import read_page
from tests.pages.running import PageError, run_page


def run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a_page.md"
    path.write_text(dedent(text), encoding="utf-8")
    (folder := tmp_path / "folder").mkdir()
    run_page(read_page(path), folder)


KEPT = {
    "files, Python that imports them, and what it prints": """
        ```python title="greeting.py"
        TEXT = "hello"
        ```

        ```python
        from greeting import TEXT
        print(TEXT, "there")
        ```

        ```text
        hello …
        ```

        ```python
        print(TEXT)
        ```
        ```text
        hello
        ```
        """,
    "a shell that keeps its folder, and lines that go on": """
        ```console
        $ mkdir inner && cd inner
        $ printf '%s\\n' one \\
            two
        one
        two
        $ cat <<EOF
        > three
        > EOF
        three
        ```

        ```console
        $ basename "$PWD"
        inner
        ```
        """,
    "an exit status, and what is told on the way out": """
        <!-- exits with 2 -->
        ```console
        $ reward-kit run no_such_file.yaml
        …no_such_file.yaml…
        ```
        """,
    "a model that answers": """
        <!-- model answers: Italy=Rome; else=add({"x": 1}) -->
        ```python
        import json, os, urllib.request

        def ask(text):
            body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
            request = urllib.request.Request("http://localhost:8000/v1/chat/completions", body)
            request.add_header("Content-Type", "application/json")
            return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

        print(ask("Capital of Italy?")["content"])
        print(ask("1 + 1?")["tool_calls"][0]["function"]["name"])
        print(os.environ["OPENAI_BASE_URL"].endswith("/v1"))
        ```
        ```text
        Rome
        add
        True
        ```
        """,
    "a server in the background, behind a port of this page's": """
        <!-- waits for: Serving HTTP -->
        ```console
        $ python -u -m http.server --bind 127.0.0.1 --directory . $(echo 127.0.0.1:8765 | cut -d: -f2) 2>&1 | cat &
        ```
        """,
    "what was done before, runs by age, and parts of task files": """
        <!-- before this page:
        mkdir -p runs/old runs/new
        echo '{"started": "2026-01-01"}' > runs/old/run.json
        echo '{"started": "2026-01-02"}' > runs/new/run.json
        -->
        ```console
        $ echo runs/BEFORE runs/AFTER runs/RUN
        runs/old runs/new runs/new
        ```
        ```yaml
        limits: {wall_time_s: 3}
        ```
        <!-- yaml: other -->
        ```yaml
        jobs: {}
        ```
        """,
}
BROKEN = {
    "prints something else": "```python\nprint(1)\n```\n```text\n2\n```\n",
    "the Python failed": "```python\n1 / 0\n```\n",
    "DeprecationWarning": "```python\nimport warnings\nwarnings.warn('old', DeprecationWarning)\n```\n",
    "the interpreter ended": "```python\nimport os\nos._exit(3)\n```\n",
    "exits with 1, not with 0": "```console\n$ false\n```\n",
    "exits with 0, not with 1": "<!-- exits with 1 -->\n```console\n$ true\n```\n",
    "`echo 1` prints something else": "```console\n$ echo 1\n2\n```\n",
    "begins with a command": "```console\necho 1\n```\n",
    "num_rollout: Extra inputs": "```yaml\nnum_rollout: 3\n```\n",
    "this is no YAML": "```yaml\na: [\n```\n",
    "there is no such run": "```console\n$ ls runs/RUN\n```\n",
    "before this page: exits with 1": "<!-- before this page:\nfalse\n-->\n",
}


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT.keys())
def test_correct_page_passes(tmp_path: Path, text: str) -> None:
    run(tmp_path, text)


@pytest.mark.parametrize(("told", "text"), BROKEN.items(), ids=BROKEN.keys())
def test_incorrect_page_fails_with_the_reason(tmp_path: Path, told: str, text: str) -> None:
    with pytest.raises(PageError, match=r"a_page\.md") as failed:
        run(tmp_path, text)
    assert told in str(failed.value)


@pytest.mark.parametrize(
    ("expected", "got", "agree"),
    [
        ("a … c", "a b c", True),
        ("a … c", "a b\nc", False),
        ("a\n…\nd", "a\nb\nc\nd", True),
        ("a\n…\nd", "a\nd", True),
        ("…", "", True),
        ("a", "a  \n", True),
        ("a", "a\nb", False),
        ("a.c", "abc", False),
        ("", "a", False),
    ],
)
def test_ellipsis_matches_text_within_a_line_or_whole_lines(expected: str, got: str, agree: bool) -> None:
    assert (difference(expected, got) is None) == agree
