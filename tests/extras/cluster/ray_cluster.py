"""A Ray cluster whose nodes are processes of this machine: python ray_cluster.py RESOURCE ...

Its head has 1 of each resource. Its address is printed. Then each line of standard input is a change, which
is answered with "done": `add NAME RESOURCE ...` starts a node, `kill NAME` ends a node with SIGKILL. The
cluster ends with its standard input.
"""

import sys
from collections.abc import Sequence
from typing import Any

from ray.cluster_utils import Cluster


def node(resources: Sequence[str]) -> dict[str, Any]:
    return {"num_cpus": 4, "object_store_memory": 80_000_000, "resources": dict.fromkeys(resources, 1)}


def main() -> None:
    head = {**node(sys.argv[1:]), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {}
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["add", name, *resources]:
                nodes[name] = cluster.add_node(**node(resources))
            case ["kill", name]:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
