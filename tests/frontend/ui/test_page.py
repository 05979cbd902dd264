"""The routes of the page: its policy, its caches, its files, and the setting that turns it off."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from service.frontend.ui.page import MEDIA_TYPES, read_assets
from tests.frontend.in_process import InProcess, in_process

SCRIPTS = {name: asset.content.decode() for name, asset in read_assets().items() if name.endswith(".js")}


def test_page_and_all_its_files_come_from_the_service(local: InProcess) -> None:
    """With a policy that allows files of the service and nothing inline."""
    page = local.client.get("/").text
    assert "//" not in page, "no address of another host"
    loaded = re.findall(r'(?:src|href)="(/ui/[^"]+)"', page)
    for script in SCRIPTS.values():
        loaded += [f"/ui/{name}" for name in re.findall(r'from "\./([\w.]+)"', script)]
    assert {path.removeprefix("/ui/") for path in loaded} == set(read_assets()) - {"index.html"}
    for path in ("/", *loaded):
        answer = local.client.get(path)
        kind = MEDIA_TYPES[Path(path).suffix or ".html"]
        assert answer.status_code == 200 and answer.headers["content-type"] == kind
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    for name, script in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script), name


def test_browser_asks_whether_its_copy_is_current(local: InProcess) -> None:
    first = local.client.get("/ui/style.css")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'W/{tag}, "other"', f'"other",{tag}', "*"):
        again = local.client.get("/ui/style.css", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert local.client.get("/ui/style.css", headers={"if-none-match": '"other"'}).content == first.content
    assert local.client.get("/ui/main.js").headers["etag"] != tag


def test_other_files_are_not_served(local: InProcess) -> None:
    for name in ("page.py", "..%2fapp.py", "%2e%2e", "", "main.js.map"):
        assert local.client.get(f"/ui/{name}").status_code == 404, name
    assert local.client.post("/").status_code == 405


def test_setting_turns_the_page_off(models_folder: Path, tmp_path: Path) -> None:
    with in_process(models_folder, tmp_path, page=False) as local:
        for path in ("/", "/ui/main.js"):
            assert local.client.get(path).status_code == 404
        assert local.client.get("/access").status_code == local.client.get("/docs").status_code == 200


def test_package_has_every_file_of_the_page() -> None:
    kinds = {Path(file.name).suffix for file in files("service.frontend.ui").iterdir() if file.is_file()} - {".py"}
    project = Path(__file__).parents[3] / "pyproject.toml"
    [patterns] = re.findall(r'"service.frontend.ui" = \[(.*)\]', project.read_text())
    assert kinds == set(re.findall(r"\*(\.\w+)", patterns)) == set(MEDIA_TYPES)
