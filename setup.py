"""Packages of the wheel. pyproject.toml has everything else.

The embedded models and the load generator are folders of the repository. The wheel has them inside `service`, so that it installs
no top-level package with a common name.
"""

from setuptools import find_packages, setup

LOAD_GENERATOR = find_packages(include=["loadtest", "loadtest.*"])

setup(
    packages=[
        *find_packages(include=["service", "service.*", "kernels", "kernels.*"]),
        *(f"service.{name}" for name in LOAD_GENERATOR),
        "service.embedded_models",
    ],
    package_dir={"service.embedded_models": "models", "service.loadtest": "loadtest"},
)
