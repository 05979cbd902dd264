"""The container files, the lock files of the image and the files for proxies and Ray, without running any of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from service.frontend.run.session_header import SESSION_HEADER
from service.settings import PREFIX, Settings, load
from tests.deploy.shipped import COMPOSE, DEPLOY, GPU, ROOT, instructions, read, services

DEFAULTS = Settings()
TEMPLATES = (DEPLOY / "chart" / "templates" / "monitoring.yaml").read_text()
STOP_SECONDS = DEFAULTS.lame_duck_seconds + DEFAULTS.drain_seconds
NEVER_CALLED = {"ptrace", "process_vm_readv", "mount", "unshare", "setns", "bpf", "keyctl", "io_uring_setup", "clone3"}


def test_hadolint_passes() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_build_context_has_only_what_is_copied() -> None:
    taken = [line.split() for line in instructions("COPY") if not line.startswith("--from")]
    copied = {source for *sources, _ in taken for source in sources}
    everything, *patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    assert everything == "*" and {pattern[1:] for pattern in patterns if pattern.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


def test_image_has_a_numeric_user_and_the_settings_of_a_container() -> None:
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", instructions("USER")[-1]) and instructions("STOPSIGNAL") == ["SIGTERM"]
    given = dict(word.split("=", 1) for word in instructions("ENV")[-1].split()) | services(GPU)["service"]["environment"]
    assert load({}, given).host == "0.0.0.0"  # in a container, no client reaches 127.0.0.1
    assert instructions("EXPOSE") == [f"{DEFAULTS.port} {DEFAULTS.grpc_port}"]


def test_compose_files_fit_the_dockerfile_and_are_careful() -> None:
    """Shipped files are mounted read-only, images have versions, and ports are published on this machine only."""
    taken = {line.partition("=")[0] for line in instructions("ARG")}
    assert all(set(services(file)["service"]["build"]["args"]) <= taken for file in (COMPOSE, GPU))
    mounts = [mount.split(":") for one in services(COMPOSE).values() for mount in one.get("volumes", ()) if mount[0] == "."]
    assert mounts and [source for source, _, mode in mounts if mode != "ro" or not (ROOT / source).exists()] == []
    prometheus = {mount.split(":")[1] for mount in services(COMPOSE)["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in ["prometheus.yml", *read("prometheus.yml")["rule_files"]]} <= prometheus
    for one in services(COMPOSE).values():
        assert "build" in one or re.fullmatch(r".+:v?\d+\.\d+\.\d+", one["image"])
        assert all(re.match(r"127\.0\.0\.1:|\$\{SEQSERVE_HOST:-127\.0\.0\.1\}:", port) for port in one["ports"])


def test_service_starts_without_the_images_of_other_projects() -> None:
    assert [name for name, one in services(COMPOSE).items() if "profiles" not in one] == ["service"]


def test_chart_is_complete_without_the_repository() -> None:
    assert [path for path in (DEPLOY / "chart").rglob("*") if path.is_symlink()] == []
    assert all((DEPLOY / "chart" / file).is_file() for file in re.findall(r'Files.Get "(.+?)"', TEMPLATES))


def test_containers_and_ray_wait_for_lame_duck_and_drain() -> None:
    assert int(services(COMPOSE)["service"]["stop_grace_period"].removesuffix("s")) > STOP_SECONDS
    [application] = read("ray/serve.yaml")["applications"]
    variables = application["runtime_env"]["env_vars"]
    settings = Settings(**{name.removeprefix(PREFIX).lower(): value for name, value in variables.items()})
    waits = application["deployments"][0]["graceful_shutdown_timeout_s"]
    assert waits >= settings.lame_duck_seconds + settings.drain_seconds + 10


def test_system_calls_are_limited_without_a_gpu() -> None:
    [file] = [option.partition(":")[2] for option in services(COMPOSE)["service"]["security_opt"] if "seccomp" in option]
    profile = json.loads((ROOT / file).read_text())
    allowed = {name for entry in profile["syscalls"] if entry["action"] == "SCMP_ACT_ALLOW" for name in entry["names"]}
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO" and not allowed & NEVER_CALLED
    assert not any("seccomp" in option for option in services(GPU)["service"]["security_opt"])


# The lock files of the image.

ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(name: str) -> dict[str, str]:
    """Return the versions in a lock file. Every line of it belongs to an entry with at least one hash."""
    text = re.sub(r"^#.*$", "", (DEPLOY / "requirements" / f"{name}.txt").read_text(), flags=re.MULTILINE)
    assert not ENTRY.sub("", text).strip(), "each package has hashes, and nothing else is in the file"
    return {canonicalize_name(package): version for package, version, _ in ENTRY.findall(text)}


@pytest.mark.parametrize(("name", "extras"), [("cpu", ["redis", "trace"]), ("gpu", ["gpu", "redis", "trace"])])
def test_lock_has_what_the_project_and_its_packages_need(name: str, extras: list[str]) -> None:
    """If this fails after a change of dependencies, run `make lock`. The files of torch come from another index."""
    versions, found = locked(name), set[str]()
    pairs = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(r"[^#].*==", line)]
    tested = {canonicalize_name(package): version for package, version in pairs}
    left = [
        Requirement(line)
        for line in [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][one] for one in extras)]
        for line in ([line] if isinstance(line, str) else line)
    ]
    assert {package: version for package, version in tested.items() if package in versions}.items() <= versions.items()
    while left:
        needed = left.pop()
        package = canonicalize_name(needed.name)
        if package != "torch" and not package.startswith(("nvidia-", "cuda-", "triton")):
            assert versions[package] in needed.specifier, needed
        if package not in found:
            found.add(package)
            try:
                below = map(Requirement, requires(package) or ())
            except PackageNotFoundError:
                continue
            left += [one for one in below if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert len(found) > 30 and locked("cpu").items() <= versions.items()


# The files for proxies. tests/cluster runs them.


def settings_of(file: str) -> str:
    """Return a file without its comments."""
    return "\n".join(line.partition("#")[0] for line in (DEPLOY / "proxies" / file).read_text().splitlines())


def seconds(file: str, setting: str) -> list[float]:
    """Return the values of a time, in the order of the file."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
    found = re.findall(rf"\b{setting}:? +([0-9.]+)(ms|s|m|h)\b", settings_of(file))
    assert found, f"{file} sets no {setting}"
    return [float(value) * units[unit] for value, unit in found]


@pytest.mark.parametrize(
    ("file", "waits", "idles"),
    [
        ("nginx.conf", "(?:proxy|grpc)_(?:read|send)_timeout", "keepalive_timeout"),
        ("haproxy.cfg", "timeout (?:client|server|tunnel)", "pool-purge-delay"),
        ("envoy.yaml", "stream_idle_timeout", "(?<!stream_)idle_timeout"),
    ],
)
def test_proxies_fit_the_limits_of_the_service(file: str, waits: str, idles: str) -> None:
    """They wait longer than the longest deadline, and close idle connections before the service does."""
    assert all(value > DEFAULTS.max_deadline_ms / 1000 for value in seconds(file, waits))
    assert all(value < DEFAULTS.idle_seconds for value in seconds(file, idles))


def test_proxies_repeat_only_refused_connections_and_know_the_same_replicas() -> None:
    names = ["seqserve-1", "seqserve-2", "seqserve-3"]
    nginx, haproxy = settings_of("nginx.conf"), settings_of("haproxy.cfg")
    assert re.findall(r"client_max_body_size (\w+);", nginx) == [f"{DEFAULTS.max_body_bytes >> 20}m", "0"]
    assert "non_idempotent" not in nginx and set(re.findall(r"next_upstream ([^;]+);", nginx)) == {"error timeout"}
    assert re.findall(r"retry-on (.*)", haproxy) == ["conn-failure"]
    for text in (nginx, haproxy):
        assert re.findall(r"(seqserve-\d):800[01]", text) == 4 * names
        assert SESSION_HEADER.replace("-", "_") in text.replace("-", "_")
    resources = yaml.safe_load((DEPLOY / "proxies" / "envoy.yaml").read_text())["static_resources"]
    for listener in resources["listeners"]:
        [host] = listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
        assert host["retry_policy"]["retry_on"] == "connect-failure" and host["retry_policy"]["retry_host_predicate"]
        assert not any("retry_policy" in route["route"] for route in host["routes"])
    for cluster in resources["clusters"]:
        [group], [check] = cluster["load_assignment"]["endpoints"], cluster["health_checks"]
        assert [end["endpoint"]["address"]["socket_address"]["address"] for end in group["lb_endpoints"]] == names
        assert check["http_health_check"] == {"path": "/readyz"} and check["no_traffic_interval"] == check["interval"]


def test_runtimes_of_kserve_probe_a_port_of_the_service() -> None:
    """The health port, as the chart does, or with Knative the port of the pod. gRPC has no paths."""
    health_port = read("chart/values.yaml")["healthPort"]
    for file in ("runtime.yaml", "runtime-knative.yaml"):
        for runtime in yaml.safe_load_all((DEPLOY / "kserve" / file).read_text()):
            [container] = runtime["spec"]["containers"]
            settings = load({}, {each["name"]: each["value"] for each in container["env"]})
            served = {port["containerPort"] for port in container["ports"]}
            assert served <= {settings.port, settings.grpc_port} == {DEFAULTS.port, DEFAULTS.grpc_port}
            assert settings.health_port == (health_port if file == "runtime.yaml" else "off")
            probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}
            assert probes.keys() >= {"readinessProbe", "livenessProbe"}
            for name, probe in probes.items():
                [(kind, request)] = [item for item in probe.items() if isinstance(item[1], dict)]
                assert {request["port"]} == (served if settings.health_port == "off" else {health_port})
                assert kind == ("grpc" if request["port"] == settings.grpc_port else "httpGet")
                assert request.get("path") in (None, "/healthz" if name == "livenessProbe" else "/readyz")
