"""A plug-in of vLLM: it makes vLLM know the weight-transfer backend "tailrace".

vLLM calls `register` in each of its processes, because the package names it as an entry point of the group
`vllm.general_plugins`. A server that a run starts has it without an installation (`extras.http.server`);
into the environment of another server: `pip install --no-deps tailrace`.
"""

BACKEND = "tailrace"
"""The name for `--weight-transfer-config`."""

_MODULE = "tailrace.extras.http.vllm_backend"


def register() -> None:
    """Name the backend to vLLM. A second call has no effect."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, _MODULE, "TailraceTransfer")
    except ValueError:  # it knows it already
        return
