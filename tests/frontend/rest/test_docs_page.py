"""The page at /docs needs no other host, and its policy allows the files that it loads."""

from __future__ import annotations

import base64
import hashlib
import re

from tests.frontend.in_process import InProcess


def test_page_and_its_files_come_from_the_service(local: InProcess) -> None:
    page = local.client.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "//" not in re.sub(r"<!--.*?-->|<script>.*?</script>", "", page.text, flags=re.DOTALL), "no address of another host"
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3
    for path in loaded:
        answer = local.client.get(path)
        assert answer.status_code == 200 and answer.content
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert local.client.get("/openapi.json").json()["info"]["title"] == "seqserve"


def test_policy_allows_the_script_of_the_page_and_no_other(local: InProcess) -> None:
    page = local.client.get("/docs")
    [script] = re.findall(r"<script>(.*?)</script>", page.text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert page.headers["x-frame-options"] == "DENY"


def test_other_files_are_not_served(local: InProcess) -> None:
    for name in ("__init__.py", "..%2f__init__.py", "main.py", "%2e%2e"):
        assert local.client.get(f"/docs/{name}").status_code == 404
