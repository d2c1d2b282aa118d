"""The manifests of ``experiments/cluster`` against the schemas of Ray and of KubeRay.

KubeRay's schemas have megabytes and are not part of this repository. With ``KUBERAY_CRDS``, the
folder ``helm-chart/kuberay-operator/crds`` of a checkout of KubeRay, they are used as a whole;
otherwise the names and types of the fields that are used here are.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "cluster"
AUTOSCALED = ("aws.yaml", "gcp.yaml")
KUBERAY = ("raycluster.yaml", "rayjob.yaml")
CRDS = os.environ.get("KUBERAY_CRDS")

TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
LABELS = {"type": "object", "additionalProperties": TEXT}


def only(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


GROUP = {"rayStartParams": LABELS, "labels": LABELS, "template": {"type": "object"}}
WORKERS = only(
    "groupName maxReplicas minReplicas template",
    groupName=TEXT, replicas=NUMBER, minReplicas=NUMBER, maxReplicas=NUMBER, **GROUP,
)  # fmt: skip
CLUSTER = only(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=only(
        version={"enum": ["v1", "v2"]},
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        idleTimeoutSeconds=NUMBER,
    ),
    headGroupSpec=only("template", **GROUP),
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
JOB = only(
    entrypoint=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
    backoffLimit=NUMBER,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=NUMBER,
    rayClusterSpec=CLUSTER,
)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def cluster_spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = documents(name)[0]["spec"]
    return spec.get("rayClusterSpec", spec)


def strict(schema: Any) -> Any:
    """Return a schema of Kubernetes that refuses fields which the API server would drop."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    keeps = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not keeps:
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.parametrize("name", AUTOSCALED)
def test_a_cluster_file_is_valid_and_ships_existing_files(name: str) -> None:
    (config,) = documents(name)
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    for shipped in config["file_mounts"].values():
        assert (ROOT / shipped).exists(), shipped
    assert "~/quickstart.yaml" in config["file_mounts"], "the default of experiments/sweep.py"
    types = config["available_node_types"]
    workers = [types[name] for name in types if name != config["head_node_type"]]
    assert len(workers) == len(types) - 1 and all(node["min_workers"] > 0 for node in workers)
    assert all(node["labels"]["rayhive/class"] for node in types.values())


@pytest.mark.parametrize("name", KUBERAY)
def test_a_manifest_of_kuberay_has_fields_of_its_schema(name: str) -> None:
    manifest, claim = documents(name)
    assert manifest["apiVersion"] == "ray.io/v1"
    schema = {"RayCluster": CLUSTER, "RayJob": JOB}[manifest["kind"]]
    jsonschema.validate(manifest["spec"], schema)
    (volume,) = cluster_spec(name)["headGroupSpec"]["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.skipif(CRDS is None, reason="KUBERAY_CRDS names no folder with KubeRay's schemas")
@pytest.mark.parametrize("name", KUBERAY)
def test_a_manifest_is_valid_by_the_whole_schema_of_kuberay(name: str) -> None:
    manifest, _ = documents(name)
    file = Path(str(CRDS)) / f"ray.io_{manifest['kind'].lower()}s.yaml"
    crd = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    (version,) = (item for item in crd["spec"]["versions"] if item["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(manifest, schema)
    manifest["spec"]["notAField"] = 1
    with pytest.raises(jsonschema.ValidationError, match="notAField"):
        jsonschema.validate(manifest, schema)


def test_both_manifests_of_kuberay_describe_the_same_cluster() -> None:
    first, second = map(cluster_spec, KUBERAY)
    assert first == second
    pods = [first["headGroupSpec"], *first["workerGroupSpecs"]]
    images = {c["image"] for pod in pods for c in pod["template"]["spec"]["containers"]}
    assert len(images) == 1


def test_the_user_of_the_image_may_write_to_the_volume_of_the_head() -> None:
    """A fresh disk belongs to root. Ray's images run as `ray`, of the group 100."""
    for name in KUBERAY:
        pod = cluster_spec(name)["headGroupSpec"]["template"]["spec"]
        assert pod["securityContext"] == {"fsGroup": 100}


def test_all_run_the_version_of_ray_that_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^ray==(\S+)$", pins, re.M)
    image = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM rayproject/ray:([\d.]+)-", image, re.M) == [pinned]
    assert {cluster_spec(name)["rayVersion"] for name in KUBERAY} == {pinned}


def test_the_job_runs_an_existing_study_and_keeps_its_run_folder() -> None:
    job = documents("rayjob.yaml")[0]["spec"]
    program, command, study, option, out = job["entrypoint"].split()
    assert (program, command, option) == ("rayhive", "sweep", "--out")
    image = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    (home,) = re.findall(r"^COPY --chown=ray \. (\S+)$", image, re.M)
    assert (ROOT / Path(study).relative_to(home)).is_file()
    (head,) = cluster_spec("rayjob.yaml")["headGroupSpec"]["template"]["spec"]["containers"]
    assert Path(out).is_relative_to(head["volumeMounts"][0]["mountPath"])


def test_a_pod_that_ends_has_the_time_that_its_peers_are_told() -> None:
    (group,) = cluster_spec("raycluster.yaml")["workerGroupSpecs"]
    pod = group["template"]["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    (told,) = re.findall(r"--deadline-remaining-seconds=(\d+);", command)
    assert command.endswith(f"sleep {told}")
    assert int(told) < pod["terminationGracePeriodSeconds"]
