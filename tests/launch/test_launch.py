"""examples/launch: SkyPilot and Ray read the files, and every key of a pod is one of Kubernetes."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FILES = Path(__file__).parents[2] / "examples" / "launch"
pytestmark = pytest.mark.launch


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyPilot keeps its state there."""
    monkeypatch.setenv("HOME", str(tmp_path))


def cluster() -> Mapping[str, Any]:
    yaml = pytest.importorskip("yaml")
    job: Mapping[str, Any] = yaml.safe_load((FILES / "kuberay.yaml").read_text())
    return {"metadata": {"name": "one", "namespace": "ours"}, "spec": job["spec"]["rayClusterSpec"]}


def unknown_keys(models: Any, name: str, value: Any, path: str) -> Iterator[str]:
    """The keys of a part of a manifest that the model of Kubernetes' API does not have."""
    if name.startswith("List["):
        for number, each in enumerate(value):
            yield from unknown_keys(models, name[5:-1], each, f"{path}[{number}]")
    elif hasattr(model := getattr(models, name, None), "attribute_map"):
        kinds = {key: model.openapi_types[own] for own, key in model.attribute_map.items()}
        for key, each in value.items():
            if key in kinds:
                yield from unknown_keys(models, kinds[key], each, f"{path}.{key}")
            else:
                yield f"{path}.{key}"


def pods() -> list[Any]:
    spec = cluster()["spec"]
    return [each["template"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_skypilot_reads_its_file_as_a_job_of_eight_gpus_that_recovers() -> None:
    # SkyPilot changes the logging of its process.
    code = f"""
import sky
task = sky.Task.from_yaml({str(FILES / "skypilot.yaml")!r})
[resources] = task.resources
print(resources.accelerators, resources.use_spot, [*task.storage_mounts], "--resume" in task.run)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "{'H100': 8} True ['/runs'] True"


def test_ray_finds_the_resources_of_each_group_of_kuberays_file() -> None:
    config = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")
    groups = config._derive_autoscaling_config_from_ray_cr(cluster())["available_node_types"]
    assert {name: group["resources"].get("GPU", 0) for name, group in groups.items()} == {
        "headgroup": 0,
        "gpus": 4,
    }
    assert (groups["gpus"]["min_workers"], groups["gpus"]["max_workers"]) == (2, 2)


def test_every_key_of_a_pod_is_one_of_kubernetes() -> None:
    models = pytest.importorskip("kubernetes.client.models")
    found = [key for pod in pods() for key in unknown_keys(models, "V1PodTemplateSpec", pod, "pod")]
    assert (len(pods()), found) == (2, [])
    pods_of_others = [{"spec": {"containers": [{"name": "a", "volumeMount": []}]}}]
    planted = [key for pod in pods_of_others for key in unknown_keys(models, "V1PodTemplateSpec", pod, "pod")]
    assert planted == ["pod.spec.containers[0].volumeMount"]
