"""Rules about the combined meaning of the chart's objects, which no schema knows. Each check returns the faults that it finds.

The facts about the image come from the Dockerfile and the compose files, the facts about settings and metrics from the service.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import yaml

from service.errors import SettingsError
from service.settings import PREFIX, Settings, load
from tests.deploy.kubernetes.tools import ROOT, Object
from tests.deploy.shipped import exposed, rules
from tests.deploy.test_containers import COMPOSE, GPU, instructions, services

Check = Callable[[list[Object]], list[str]]
CHECKS: list[Check] = []
MARGIN_SECONDS = 8
"""Time that a container needs after its drain, at least: to hand over sessions and to end."""


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def one(objects: list[Object], kind: str) -> Object:
    [found] = of_kind(objects, kind)
    return found


def pod(objects: list[Object]) -> Object:
    """Return the pod's metadata and spec."""
    template: Object = one(objects, "Deployment")["spec"]["template"]
    return template


def container(objects: list[Object]) -> Object:
    found: Object = pod(objects)["spec"]["containers"][0]
    return found


def environment(objects: list[Object]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(objects)["env"] if "value" in each}


def settings(objects: list[Object]) -> Settings:
    return load({}, {name: value for name, value in environment(objects).items() if name.startswith(PREFIX)})


def image_environment() -> dict[str, str]:
    """Return the variables of the image."""
    return dict(word.split("=", 1) for word in instructions("ENV")[-1].split())


def matches(selector: Object, labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", selector)
    return bool(wanted) and wanted.items() <= labels.items()


def main_service(objects: list[Object]) -> Object:
    """Return the Service for clients."""
    return one(objects, "Service")


def autoscalers(objects: list[Object]) -> list[Object]:
    return of_kind(objects, "HorizontalPodAutoscaler") + of_kind(objects, "ScaledObject")


def metrics_port(objects: list[Object]) -> str:
    """Return the name of the port that has the metrics."""
    read = settings(objects)
    if read.health_port != "off" and not read.tls_cert:
        return "health"
    return "http" if read.admin_port == "off" else "admin"


def names(objects: list[Object]) -> Iterator[str]:
    for each in objects:
        yield f"{each['kind']} {each['metadata']['name']}"


@check
def objects_have_names_of_their_own(objects: list[Object]) -> list[str]:
    every = list(names(objects))
    long = [f"{name} is longer than 63 characters" for name in every if len(name.split()[1]) > 63]
    return long + [f"{name} is there {every.count(name)} times" for name in set(every) if every.count(name) > 1]


@check
def selectors_match_the_pods(objects: list[Object]) -> list[str]:
    labels = pod(objects)["metadata"]["labels"]
    selecting: dict[str, Callable[[Object], Object]] = {
        "Deployment": lambda spec: spec["selector"],
        "Service": lambda spec: spec["selector"],
        "PodDisruptionBudget": lambda spec: spec["selector"],
        "NetworkPolicy": lambda spec: spec["podSelector"],
    }
    faults = [
        f"{kind} {each['metadata']['name']} selects no pod of the chart"
        for kind, selector in selecting.items()
        for each in of_kind(objects, kind)
        if not matches(selector(each["spec"]), labels)
    ]
    spread = pod(objects)["spec"]["topologySpreadConstraints"]
    return faults + [
        "a topologySpreadConstraint counts other pods" for each in spread if not matches(each["labelSelector"], labels)
    ]


@check
def ports_exist(objects: list[Object]) -> list[str]:
    ports = {port["name"]: port["containerPort"] for port in container(objects)["ports"]}
    read = settings(objects)
    listening: dict[str, int | str] = {"http": read.port, "grpc": read.grpc_port}
    listening |= {"admin": read.admin_port, "health": read.health_port}
    listening = {name: port for name, port in listening.items() if port != "off"}
    faults = [] if ports == listening else [f"the container has the ports {ports}, and the service listens on {listening}"]
    used = [("Service", port["targetPort"]) for each in of_kind(objects, "Service") for port in each["spec"]["ports"]]
    used += [
        (name, container(objects)[name]["httpGet"]["port"]) for name in ("startupProbe", "readinessProbe", "livenessProbe")
    ]
    for policy in of_kind(objects, "NetworkPolicy"):
        rules_ = [*policy["spec"]["ingress"], *policy["spec"]["egress"]]
        used += [("NetworkPolicy", port["port"]) for rule in rules_ for port in rule["ports"] if isinstance(port["port"], str)]
    return faults + [f"{user} names the port {port}, which the container lacks" for user, port in used if port not in ports]


@check
def probes_ask_the_right_questions(objects: list[Object]) -> list[str]:
    """A pod that drains is not ready and alive, and a start may take as long as the service allows."""
    has, read = container(objects), settings(objects)
    faults = []
    for name, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")):
        request = has[name]["httpGet"]
        if request["path"] != path:
            faults.append(f"{name} asks {request['path']} and not {path}")
        scheme = request.get("scheme", "HTTP")
        if scheme != ("HTTPS" if read.tls_cert and request["port"] != "health" else "HTTP"):
            faults.append(f"{name} speaks {scheme}, and the service does not")
        if read.health_port != "off" and request["port"] != "health":
            faults.append(f"{name} waits behind the requests of clients")
    budget = has["startupProbe"]["periodSeconds"] * has["startupProbe"]["failureThreshold"]
    if budget <= read.start_seconds:
        faults.append(f"the startup probe gives up after {budget} s, and a start may take {read.start_seconds:g} s")
    rollout = one(objects, "Deployment")["spec"]
    if rollout["progressDeadlineSeconds"] <= budget + rollout["minReadySeconds"]:
        faults.append("progressDeadlineSeconds is shorter than a start")
    return faults


@check
def grace_exceeds_the_drain(objects: list[Object]) -> list[str]:
    read = settings(objects)
    pre_stop = container(objects).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    needed = pre_stop + read.lame_duck_seconds + read.drain_seconds + MARGIN_SECONDS
    grace = pod(objects)["spec"]["terminationGracePeriodSeconds"]
    return [f"terminationGracePeriodSeconds is {grace}, and a stop may take {needed:g} s"] if grace < needed else []


@check
def a_rollout_can_proceed(objects: list[Object]) -> list[str]:
    rollout = one(objects, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    return ["a rollout can neither add nor remove a pod"] if not (rollout["maxSurge"] or rollout["maxUnavailable"]) else []


@check
def variables_are_settings(objects: list[Object]) -> list[str]:
    given = [each["name"] for each in container(objects)["env"]]
    faults = [f"{name} is set twice" for name in set(given) if given.count(name) > 1]
    if pod(objects)["spec"].get("enableServiceLinks") is not False:
        faults.append("enableServiceLinks is not false: a Service seqserve would set SEQSERVE_PORT")
    read = settings(objects)
    if not read.replicated:
        faults.append("the service does not know that it is one of several replicas")
    if read.host != "0.0.0.0":
        faults.append(f"the service listens on {read.host}, which no probe reaches")
    if not (read.keys or read.insecure):
        faults.append("the service has neither keys nor consent to serve everybody")
    by_address = read.allowed_hosts == "*" or (read.keys and not read.allowed_hosts)
    if of_kind(objects, "ServiceMonitor") and not by_address:
        faults.append("allowed_hosts leaves out the addresses of pods, by which Prometheus names them")
    return faults


@check
def mounts_are_what_the_service_reads(objects: list[Object]) -> list[str]:
    volumes = {each["name"]: each for each in pod(objects)["spec"]["volumes"]}
    mounts = {each["mountPath"]: each for each in container(objects)["volumeMounts"]}
    inits = [mount["name"] for each in pod(objects)["spec"].get("initContainers", ()) for mount in each.get("volumeMounts", ())]
    mounted = [each["name"] for each in mounts.values()]
    faults = [f"the volume {name} does not exist" for name in {*mounted, *inits} - volumes.keys()]
    faults += [f"the volume {name} is not mounted" for name in volumes.keys() - set(mounted)]
    read, image = settings(objects), image_environment()
    if str(read.models) != image["SEQSERVE_MODELS"] or str(read.cache) != image["SEQSERVE_CACHE"]:
        faults.append(f"the models are in {read.models} and the kernels in {read.cache}, and the image has them elsewhere")
    own = {str(read.models), str(read.cache), read.session_store, "/tmp"}
    files = {name: getattr(read, name) for name in ("keys", "state_keys", "tls_cert", "tls_key") if getattr(read, name)}
    folders = {str(PurePosixPath(file).parent) for file in files.values()}
    faults += [
        f"{name} is {file}, and no volume is mounted there"
        for name, file in files.items()
        if str(PurePosixPath(file).parent) not in mounts
    ]
    if read.session_store.startswith("/") and mounts.get(read.session_store, {"readOnly": True}).get("readOnly"):
        faults.append(f"sessions are saved in {read.session_store}, which is no volume that can be written")
    faults += [f"{path} is mounted, and the service reads nothing there" for path in mounts.keys() - folders - own]
    faults += [
        f"{path} can be written" for path in {str(read.models), *folders} & mounts.keys() if not mounts[path].get("readOnly")
    ]
    return faults


@check
def the_root_file_system_is_read_only(objects: list[Object]) -> list[str]:
    """The image writes to the places that the compose files give it."""
    has = container(objects)
    faults = [] if has["securityContext"].get("readOnlyRootFilesystem") else ["the root file system can be written"]
    writable = set(services(COMPOSE)["service"]["tmpfs"])
    if settings(objects).device != "auto":
        writable |= {volume.split(":")[1] for volume in services(GPU)["service"]["volumes"]}
    mounted = {each["mountPath"] for each in has["volumeMounts"] if not each.get("readOnly")}
    return faults + [f"the image writes to {path}, where nothing is mounted" for path in writable - mounted]


@check
def the_user_is_that_of_the_image(objects: list[Object]) -> list[str]:
    context, has = pod(objects)["spec"]["securityContext"], container(objects)["securityContext"]
    user, group = (int(id) for id in instructions("USER")[-1].split(":"))
    faults = []
    if (context.get("runAsUser"), context.get("runAsGroup"), context.get("runAsNonRoot")) != (user, group, True):
        faults.append(f"the pod does not run as the image's user {user}:{group}")
    if context.get("fsGroup") != group:
        faults.append(f"volumes are not readable for the image's group {group}")
    if has.get("allowPrivilegeEscalation") is not False or has.get("capabilities", {}).get("drop") != ["ALL"]:
        faults.append("the container may have privileges")
    if pod(objects)["spec"].get("automountServiceAccountToken") is not False:
        faults.append("the pod has a token of the cluster")
    return faults


@check
def evictions_are_possible(objects: list[Object]) -> list[str]:
    faults = []
    for budget in of_kind(objects, "PodDisruptionBudget"):
        spec = budget["spec"]
        if "minAvailable" in spec or spec.get("maxUnavailable") in (None, 0, "0%"):
            faults.append("the PodDisruptionBudget can block the drain of a node for ever")
        if spec.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            faults.append("a pod that never becomes ready blocks the drain of a node")
    return faults


@check
def one_scaler_owns_the_replicas(objects: list[Object]) -> list[str]:
    deployment, scalers = one(objects, "Deployment"), autoscalers(objects)
    faults = [] if len(scalers) < 2 else ["there are two autoscalers"]
    if bool(scalers) == ("replicas" in deployment["spec"]):
        faults.append("the Deployment and an autoscaler both set the replicas, or neither does")
    for scaler in scalers:
        if scaler["spec"]["scaleTargetRef"]["name"] != deployment["metadata"]["name"]:
            faults.append("the autoscaler scales another Deployment")
        spec = scaler["spec"]
        least, most = (spec.get(f"{end}Replicas") or spec.get(f"{end}ReplicaCount") for end in ("min", "max"))
        if not 1 <= least <= most:
            faults.append(f"the autoscaler goes from {least} to {most} replicas")
    return faults


@check
def scalers_read_metrics_of_the_service(objects: list[Object]) -> list[str]:
    """All metrics: devices that are busy, work that waits, and sessions that hold places.

    KEDA divides a query by the number of pods, so it has to be a sum. For a HorizontalPodAutoscaler, prometheus-adapter computes rates.
    """
    faults = []
    for scaler in autoscalers(objects):
        metrics = [each["pods"]["metric"]["name"] for each in scaler["spec"].get("metrics", ())]
        metrics = [name.replace("_busy_share", "_busy_seconds_total") for name in metrics]
        queries = [each["metadata"]["query"] for each in scaler["spec"].get("triggers", ())]
        metrics += [name for query in queries for name in re.findall(r"seqserve\w+(?={)", query)]
        faults += [f"the autoscaler reads {name}, which the service does not have" for name in metrics if name not in exposed()]
        if set(metrics) != {"seqserve_device_busy_seconds_total", "seqserve_backlog_seconds", "seqserve_sessions"}:
            faults.append(f"the autoscaler reads {metrics}")
        faults += [f"{query} is no sum" for query in queries if not query.startswith("sum(")]
        name = main_service(objects)["metadata"]["name"]
        faults += [f"{query} reads other Services" for query in queries if f'service="{name}"' not in query]
    return faults


@check
def session_target_is_below_the_limit(objects: list[Object]) -> list[str]:
    read = settings(objects)
    places = read.max_sessions * (1 if read.device == "auto" else len(read.devices))
    faults = []
    for scaler in autoscalers(objects):
        targets = [
            each["pods"]["target"]["averageValue"] for each in scaler["spec"].get("metrics", ()) if "sessions" in str(each)
        ]
        targets += [each["metadata"]["threshold"] for each in scaler["spec"].get("triggers", ()) if "sessions" in str(each)]
        faults += [
            f"pods are added at {target} sessions, and a pod has {places} places"
            for target in targets
            if not 0 < int(target) < places
        ]
    return faults


@check
def prometheus_finds_the_service_once(objects: list[Object]) -> list[str]:
    faults = []
    for monitor in of_kind(objects, "ServiceMonitor"):
        spec = monitor["spec"]
        selected = [each for each in of_kind(objects, "Service") if matches(spec["selector"], each["metadata"]["labels"])]
        if [each["metadata"]["name"] for each in selected] != [main_service(objects)["metadata"]["name"]]:
            return [f"the ServiceMonitor selects {len(selected)} Services"]
        [endpoint] = spec["endpoints"]
        if endpoint["port"] not in {port["name"] for port in selected[0]["spec"]["ports"]} or endpoint["port"] != metrics_port(
            objects
        ):
            faults.append(f"the ServiceMonitor scrapes the port {endpoint['port']}, which has no metrics")
        job = selected[0]["metadata"]["labels"].get(spec.get("jobLabel"), selected[0]["metadata"]["name"])
        if any(wanted != job for rule in rules() for wanted in re.findall(r'job="([^"]+)"', rule["expr"])):
            faults.append(f"the job is {job}, and the rules select another")
        read = settings(objects)
        if (endpoint.get("scheme") == "https") != bool(read.tls_cert):
            faults.append("the ServiceMonitor does not speak as the service does")
        if bool(read.keys) != ("authorization" in endpoint):
            faults.append("the service has keys, and Prometheus has none")
    return faults


@check
def rules_and_dashboard_are_the_shipped_ones(objects: list[Object]) -> list[str]:
    shipped = yaml.safe_load((ROOT / "deploy" / "rules.yml").read_text())
    faults = [
        f"{each['metadata']['name']} has other rules" for each in of_kind(objects, "PrometheusRule") if each["spec"] != shipped
    ]
    dashboard = (ROOT / "deploy" / "grafana" / "dashboards" / "seqserve.json").read_text()
    for each in of_kind(objects, "ConfigMap"):
        if each["data"]["seqserve.json"].strip() != dashboard.strip():
            faults.append(f"{each['metadata']['name']} has another dashboard")
    return faults


@check
def the_network_policy_lets_through_what_is_needed(objects: list[Object]) -> list[str]:
    faults: list[str] = []
    for policy in of_kind(objects, "NetworkPolicy"):
        ingress, egress = policy["spec"]["ingress"], policy["spec"]["egress"]
        if not {"http", "grpc"} <= {port["port"] for rule in ingress for port in rule["ports"]}:
            faults.append("clients do not reach both ports")
        dns = {
            (port["port"], port["protocol"])
            for rule in egress
            if "to" not in rule
            for port in rule["ports"]
            if "protocol" in port
        }
        if not {(53, "UDP"), (53, "TCP")} <= dns:
            faults.append("pods do not reach DNS")
        scraping = [rule for rule in ingress if _opens(rule, metrics_port(objects))]
        if not any("namespaceSelector" in peer for rule in scraping for peer in rule.get("from", ())):
            faults.append("Prometheus does not reach the metrics")
        if metrics_port(objects) != "http" and any("from" not in rule for rule in scraping):
            faults.append(f"everybody reaches the {metrics_port(objects)} port")
    return faults


def _opens(rule: dict[str, Any], port: str) -> bool:
    return any(each["port"] == port for each in rule["ports"])


@check
def engines_match_the_gpus(objects: list[Object]) -> list[str]:
    resources = container(objects)["resources"]
    gpus = {name: count for name, count in resources.get("limits", {}).items() if name.startswith("nvidia.com/")}
    devices = settings(objects).device
    expected = ",".join(f"cuda:{place}" for place in range(sum(gpus.values()))) or "auto"
    faults = [] if devices == expected else [f"the limits are {gpus}, and the engines are on {devices}"]
    requested = {name: count for name, count in resources.get("requests", {}).items() if name.startswith("nvidia.com/")}
    return faults + ([] if requested in ({}, gpus) else ["the requests of GPUs differ from their limits"])


def faults(objects: list[Object]) -> list[str]:
    """Return the faults of all checks, or the reason why the service would not start."""
    try:
        settings(objects)
    except SettingsError as error:
        return [str(error)]
    return [fault for function in CHECKS for fault in function(objects)]
