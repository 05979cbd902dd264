"""The routes of the page: its policy, its caches, its files, and the setting that turns it off."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from service.frontend.ui.page import MEDIA_TYPES, read_assets
from tests.frontend.in_process import InProcess, in_process

ROOT = Path(__file__).parents[3]
MAX_LINES, MAX_COLUMNS = 250, 128
MAX_PICTURE_BYTES = 150_000
SCRIPTS = {name: asset.content.decode() for name, asset in read_assets().items() if name.endswith(".js")}
FILES = sorted(read_assets())


def test_page_and_all_its_files_come_from_the_service(local: InProcess) -> None:
    page = local.client.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert "//" not in page.text, "no address of another host"
    loaded = re.findall(r'(?:src|href)="(/ui/[^"]+)"', page.text)
    for script in SCRIPTS.values():
        loaded += [f"/ui/{name}" for name in re.findall(r'from "\./([\w.]+)"', script)]
    assert {path.removeprefix("/ui/") for path in loaded} == set(FILES) - {"index.html"}
    for path in loaded:
        answer = local.client.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"] == MEDIA_TYPES[Path(path).suffix]


def test_policy_allows_files_of_the_service_and_nothing_inline(local: InProcess) -> None:
    for path in ("/", *(f"/ui/{name}" for name in FILES)):
        answer = local.client.get(path)
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"


def test_page_has_nothing_inline(local: InProcess) -> None:
    page = local.client.get("/").text
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
    for name in ("page.py", "__init__.py", "..%2fapp.py", "%2e%2e", "", "main.js.map"):
        assert local.client.get(f"/ui/{name}").status_code == 404, name
    assert local.client.post("/").status_code == 405


def test_setting_turns_the_page_off(models_folder: Path, tmp_path: Path) -> None:
    with in_process(models_folder, tmp_path, page=False) as local:
        unknown = local.client.get("/no/such/path")
        for path in ("/", "/ui/main.js"):
            answer = local.client.get(path)
            assert (answer.status_code, answer.text) == (404, unknown.text)
        assert local.client.get("/access").status_code == local.client.get("/docs").status_code == 200


def test_package_has_every_file_of_the_page() -> None:
    folder = files("service.frontend.ui")
    kinds = {Path(file.name).suffix for file in folder.iterdir() if file.is_file()} - {".py"}
    [patterns] = re.findall(r'"service.frontend.ui" = \[(.*)\]', (ROOT / "pyproject.toml").read_text())
    assert kinds == set(re.findall(r"\*(\.\w+)", patterns)) == set(MEDIA_TYPES)


def test_pictures_of_the_page_are_small_and_used() -> None:
    text = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    pictures = sorted((ROOT / "docs" / "images").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < MAX_PICTURE_BYTES and f"images/{picture.name})" in text, picture.name


def test_files_are_short() -> None:
    for name in FILES:
        lines = read_assets()[name].content.decode().splitlines()
        if name.endswith(".js"):
            assert len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_COLUMNS, name
        assert len(lines) <= 2 * MAX_LINES, name
