"""deploy/ray/serve.yaml fits the settings of the service. tests/cluster deploys it."""

from __future__ import annotations

from service.settings import PREFIX, Settings
from tests.deploy.shipped import read

MARGIN_SECONDS = 10


def test_ray_waits_for_lame_duck_and_drain() -> None:
    [application] = read("ray/serve.yaml")["applications"]
    [deployment] = application["deployments"]
    variables = application["runtime_env"]["env_vars"]
    settings = Settings(**{name.removeprefix(PREFIX).lower(): value for name, value in variables.items()})
    assert deployment["graceful_shutdown_timeout_s"] >= settings.lame_duck_seconds + settings.drain_seconds + MARGIN_SECONDS
