"""`python -m deploy.ray.traffic`: keep Envoy's endpoints up to date with the replicas that Ray placed.

It runs beside each Envoy. If the cluster does not answer, the file stays as it is, and traffic goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ray
import yaml

from deploy.ray import endpoints
from deploy.ray.directory import directory

ANSWER_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray.traffic", description=__doc__)
    parser.add_argument("--address", default="auto", help="address of the Ray cluster")
    parser.add_argument("--envoy", type=Path, required=True, help="Envoy's configuration, with any endpoints in its clusters")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files that it writes")
    parser.add_argument("--seconds", type=float, default=1.0, help="time between two looks at the replicas")
    options = parser.parse_args(arguments)
    ray.init(address=options.address, namespace="seqserve", log_to_driver=False)
    bootstrap = yaml.safe_load(options.envoy.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    clusters = endpoints.clusters_of(bootstrap)
    known: dict[str, endpoints.Replica] = {}
    write(options.out, known, clusters)
    configuration = json.dumps(endpoints.with_eds(bootstrap, options.out.resolve()), indent=1)
    endpoints.move_into_place(options.out / endpoints.ENVOY_FILE, configuration)
    while True:
        try:
            known = ray.get(directory().view.remote(), timeout=ANSWER_SECONDS).merged(known)
            write(options.out, known, clusters)
        except (ray.exceptions.RayError, TimeoutError) as error:
            print(f"the directory gave no answer, the endpoints stay: {error}", file=sys.stderr)
        time.sleep(options.seconds)


def write(folder: Path, replicas: dict[str, endpoints.Replica], clusters: dict[str, str]) -> None:
    """Write the endpoints of each cluster if they changed."""
    changed = [
        endpoints.move_into_place(folder / endpoints.eds_file(name), endpoints.eds(replicas, name, port))
        for name, port in clusters.items()
    ]
    if any(changed):
        print(f"{len(replicas)} replicas: {', '.join(replica.url for replica in replicas.values())}", flush=True)


if __name__ == "__main__":
    main()
