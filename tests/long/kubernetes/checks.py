"""Rules about the combined meaning of the chart's objects, which no schema knows.

The facts about the image come from the Dockerfile and the compose files, the facts about settings and metrics from the service.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import yaml

from service.settings import PREFIX, Settings, load
from tests.deploy.shipped import COMPOSE, DEPLOY, GPU, RULES, exposed, instructions, rules, services
from tests.long.kubernetes.tools import Object

STOP_MARGIN_SECONDS = 8
"""Time that a container needs after its drain, at least: to hand over sessions and to end."""
PROBES = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
SCALED_BY = {"seqserve_device_busy_seconds_total", "seqserve_backlog_seconds", "seqserve_sessions"}


class Rendered:
    """The objects of a chart: its pod, its container, and the settings of the service in it."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self.deployment = self.one("Deployment")["spec"]
        self.pod = self.deployment["template"]["spec"]
        self.labels = self.deployment["template"]["metadata"]["labels"]
        self.container = self.pod["containers"][0]
        variables = {each["name"]: each["value"] for each in self.container["env"] if "value" in each}
        self.settings: Settings = load({}, {name: value for name, value in variables.items() if name.startswith(PREFIX)})

    def of_kind(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def one(self, kind: str) -> Object:
        [found] = self.of_kind(kind)
        return found

    @property
    def metrics_port(self) -> str:
        """The name of the port that has the metrics."""
        if self.settings.health_port != "off" and not self.settings.tls_cert:
            return "health"
        return "http" if self.settings.admin_port == "off" else "admin"


def check_selectors_and_names(chart: Rendered) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in chart.objects]
    assert len(set(names)) == len(names) and all(len(name) <= 63 for _, name in names)
    selectors = [each["spec"]["podSelector"] for each in chart.of_kind("NetworkPolicy")]
    selectors += [each["spec"]["selector"] for each in chart.of_kind("Deployment", "Service", "PodDisruptionBudget")]
    for selector in [*selectors, *(each["labelSelector"] for each in chart.pod["topologySpreadConstraints"])]:
        wanted = selector.get("matchLabels", selector)
        assert wanted and wanted.items() <= chart.labels.items()


def check_ports_and_probes(chart: Rendered) -> None:
    """A pod that drains is not ready and alive, and a start may take as long as the service allows."""
    read, has = chart.settings, chart.container
    ports = {port["name"]: port["containerPort"] for port in has["ports"]}
    listening = {"http": read.port, "grpc": read.grpc_port, "admin": read.admin_port, "health": read.health_port}
    assert ports == {name: port for name, port in listening.items() if port != "off"}
    used = [port["targetPort"] for each in chart.of_kind("Service") for port in each["spec"]["ports"]]
    for policy in chart.of_kind("NetworkPolicy"):
        opened = [port["port"] for way in ("ingress", "egress") for rule in policy["spec"][way] for port in rule["ports"]]
        used += [port for port in opened if isinstance(port, str)]
    assert set(used) <= ports.keys()
    for name, path in PROBES.items():
        request = has[name]["httpGet"]
        assert request["path"] == path and request["port"] == ("http" if read.health_port == "off" else "health"), name
        assert request.get("scheme", "HTTP") == ("HTTPS" if read.tls_cert and request["port"] != "health" else "HTTP"), name
    start_seconds = has["startupProbe"]["periodSeconds"] * has["startupProbe"]["failureThreshold"]
    assert read.start_seconds < start_seconds
    assert start_seconds + chart.deployment["minReadySeconds"] < chart.deployment["progressDeadlineSeconds"]


def check_pods_are_replaced_gently(chart: Rendered) -> None:
    pre_stop = chart.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    stop_seconds = pre_stop + chart.settings.lame_duck_seconds + chart.settings.drain_seconds + STOP_MARGIN_SECONDS
    assert chart.pod["terminationGracePeriodSeconds"] >= stop_seconds
    rollout = chart.deployment["strategy"]["rollingUpdate"]
    assert rollout["maxSurge"] or rollout["maxUnavailable"]
    for budget in chart.of_kind("PodDisruptionBudget"):
        assert "minAvailable" not in budget["spec"] and budget["spec"]["maxUnavailable"] not in (0, "0%")
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def check_settings(chart: Rendered) -> None:
    given, read = [each["name"] for each in chart.container["env"]], chart.settings
    assert len(set(given)) == len(given)
    assert chart.pod["enableServiceLinks"] is False, "a Service seqserve would set SEQSERVE_PORT"
    assert read.replicated and read.host == "0.0.0.0" and (read.keys or read.insecure)
    assert read.allowed_hosts == "*" or (read.keys and not read.allowed_hosts) or not chart.of_kind("ServiceMonitor")
    resources = chart.container["resources"]
    limits, requests = (
        {name: count for name, count in resources.get(kind, {}).items() if name.startswith("nvidia.com/")}
        for kind in ("limits", "requests")
    )
    assert read.device == (",".join(f"cuda:{place}" for place in range(sum(limits.values()))) or "auto")
    assert requests in ({}, limits)


def check_volumes(chart: Rendered) -> None:
    """Everything that the service reads is mounted, and it writes only where the image does."""
    read, mounts = chart.settings, {each["mountPath"]: each for each in chart.container["volumeMounts"]}
    image = dict(word.split("=", 1) for word in instructions("ENV")[-1].split())
    assert (str(read.models), str(read.cache)) == (image["SEQSERVE_MODELS"], image["SEQSERVE_CACHE"])
    inits = {mount["name"] for each in chart.pod.get("initContainers", ()) for mount in each.get("volumeMounts", ())}
    mounted = {each["name"] for each in mounts.values()}
    assert inits <= mounted == {each["name"] for each in chart.pod["volumes"]}
    files = [getattr(read, name) for name in ("keys", "state_keys", "tls_cert", "tls_key")]
    folders = {str(PurePosixPath(file).parent) for file in files if file}
    assert folders <= mounts.keys() <= folders | {str(read.models), str(read.cache), read.session_store, "/tmp"}
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert not writable & {str(read.models), *folders}
    assert not read.session_store.startswith("/") or read.session_store in writable
    needed = set(services(COMPOSE)["service"]["tmpfs"])
    if read.device != "auto":
        needed |= {volume.split(":")[1] for volume in services(GPU)["service"]["volumes"]}
    assert needed <= writable


def check_scaling(chart: Rendered) -> None:
    """KEDA divides a query by the number of pods, so it has to be a sum. For the other autoscaler, prometheus-adapter computes rates."""
    scalers, name = chart.of_kind("HorizontalPodAutoscaler", "ScaledObject"), chart.of_kind("Service")[0]["metadata"]["name"]
    assert len(scalers) + ("replicas" in chart.deployment) == 1, "either the Deployment or one autoscaler sets the replicas"
    read = chart.settings
    places = read.max_sessions * (1 if read.device == "auto" else len(read.devices))
    for spec in (each["spec"] for each in scalers):
        assert spec["scaleTargetRef"]["name"] == chart.one("Deployment")["metadata"]["name"]
        least, most = (spec.get(f"{end}Replicas") or spec.get(f"{end}ReplicaCount") for end in ("min", "max"))
        assert 1 <= least <= most
        pods = [each["pods"] for each in spec.get("metrics", ())]
        queries = [each["metadata"] for each in spec.get("triggers", ())]
        metrics = [each["metric"]["name"].replace("_busy_share", "_busy_seconds_total") for each in pods]
        metrics += [metric for each in queries for metric in re.findall(r"seqserve\w+(?={)", each["query"])]
        assert set(metrics) == SCALED_BY <= exposed()
        assert all(each["query"].startswith("sum(") and f'service="{name}"' in each["query"] for each in queries)
        targets = [each["target"]["averageValue"] for each in pods if "sessions" in each["metric"]["name"]]
        targets += [each["threshold"] for each in queries if "sessions" in each["query"]]
        assert all(0 < int(target) < places for target in targets)


def check_monitoring(chart: Rendered) -> None:
    """The ServiceMonitor selects the Service whose port has the metrics, with the job that the shipped rules name."""
    assert all(each["spec"] == yaml.safe_load((DEPLOY / RULES).read_text()) for each in chart.of_kind("PrometheusRule"))
    for spec in (each["spec"] for each in chart.of_kind("ServiceMonitor")):
        wanted, services_ = spec["selector"]["matchLabels"].items(), chart.of_kind("Service")
        [selected] = [each for each in services_ if wanted <= each["metadata"]["labels"].items()]
        [endpoint], labels = spec["endpoints"], selected["metadata"]["labels"]
        assert selected is services_[0] and endpoint["port"] == chart.metrics_port
        assert endpoint["port"] in {port["name"] for port in selected["spec"]["ports"]}
        job = labels.get(spec.get("jobLabel"), selected["metadata"]["name"])
        assert {wanted for rule in rules() for wanted in re.findall(r'job="([^"]+)"', rule["expr"])} == {job}
        assert (endpoint.get("scheme") == "https") == bool(chart.settings.tls_cert)
        assert ("authorization" in endpoint) == bool(chart.settings.keys)


def check_network_policy(chart: Rendered) -> None:
    """Clients reach the ports, pods reach DNS, and only named peers reach a separate port with the metrics."""
    for spec in (each["spec"] for each in chart.of_kind("NetworkPolicy")):
        assert {"http", "grpc"} <= {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
        anywhere = [port for rule in spec["egress"] if "to" not in rule for port in rule["ports"]]
        assert {(53, "UDP"), (53, "TCP")} <= {(port["port"], port.get("protocol")) for port in anywhere}
        scraping = [rule for rule in spec["ingress"] if chart.metrics_port in [port["port"] for port in rule["ports"]]]
        assert any("namespaceSelector" in peer for rule in scraping for peer in rule.get("from", ()))
        assert chart.metrics_port == "http" or all("from" in rule for rule in scraping)


CHECKS = [function for name, function in list(globals().items()) if name.startswith("check_")]
