"""The page at /docs needs no other host, and its policy allows the files that it loads."""

from __future__ import annotations

import base64
import hashlib
import re

from tests.frontend.in_process import InProcess


def test_page_and_its_files_come_from_the_service(local: InProcess) -> None:
    page = local.client.get("/docs")
    assert "//" not in re.sub(r"<!--.*?-->|<script>.*?</script>", "", page.text, flags=re.DOTALL), "no address of another host"
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3 and all(local.client.get(path).status_code == 200 for path in loaded)
    [script] = re.findall(r"<script>(.*?)</script>", page.text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert (policy["script-src"], policy["default-src"]) == (f"'self' 'sha256-{digest}'", "'none'")
    assert page.headers["x-frame-options"] == "DENY"
    for name in ("__init__.py", "..%2f__init__.py", "main.py", "%2e%2e"):
        assert local.client.get(f"/docs/{name}").status_code == 404
