"""The command line of a vLLM server that a run starts."""

import json
from dataclasses import dataclass
from pathlib import Path

from tailrace.engine.launch import Launch, find_interpreter
from tailrace.engine.settings import SamplingSettings, VllmEngineSettings
from tailrace.engine.vllm import RUNTIME_ADAPTERS, logprobs_mode, max_rank
from tailrace.weights.vllm_plugin import BACKEND

PYTHON_VARIABLE = "VLLM_PYTHON"
_FIND = """
from importlib.util import find_spec
from pathlib import Path
found = find_spec("vllm")
if found:
    files = Path(found.origin).parent.glob("entrypoints/**/*.py")
    print("scale_out" if any("enable_scale_out" in file.read_text() for file in files) else "plain")
"""
"""Whether an environment has vLLM, and whether its server hides /inference/v1/generate without a flag. To
import vLLM would take many seconds."""


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """A Python interpreter whose environment has vLLM."""

    python: str
    has_scale_out: bool

    @classmethod
    def find(cls, settings: VllmEngineSettings) -> "VllmInstallation":
        """Find the one that the settings, or $VLLM_PYTHON, name.

        Raises:
            ConfigError: there is none.
        """
        python, found = find_interpreter(settings, "vLLM", PYTHON_VARIABLE, _FIND)
        return cls(python, found == "scale_out")

    def launch(
        self,
        settings: VllmEngineSettings,
        sampling: SamplingSettings,
        *,
        model: Path,
        max_context: int,
        port: int,
        plugins: Path,
        seed: int = 0,
        adapter_rank: int | None = None,
    ) -> Launch:
        """The command line of one server on the loopback interface.

        Args:
            max_context: tokens of a prompt and its completion together.
            plugins: the folder that `write_plugin` has written.
            seed: of the sampling noise. Two replicas with one seed would draw the same noise.
            adapter_rank: of the adapters that it gets in place of whole weights.
        """
        flags = {
            "--model": str(model),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--seed": str(seed),
            "--dtype": settings.dtype,
            "--max-model-len": str(max_context),
            "--max-num-seqs": str(settings.max_num_seqs),
            "--tensor-parallel-size": str(settings.tensor_parallel_size),
            "--logprobs-mode": logprobs_mode(sampling),
            "--weight-transfer-config": json.dumps({"backend": BACKEND}),
        }
        words = [word for flag in flags.items() for word in flag]
        words += ["--enable-prompt-tokens-details", *(["--enable-scale-out"] if self.has_scale_out else [])]
        env = {"PYTHONPATH": str(plugins), "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        if adapter_rank is not None:
            words += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(max_rank(adapter_rank))]
            env[RUNTIME_ADAPTERS] = "1"
        module = ("-m", "vllm.entrypoints.openai.api_server")
        return Launch((self.python, *module, *words, *settings.args), env | settings.env)


def write_plugin(folder: Path) -> Path:
    """Make this package a plug-in of vLLM for every Python that has the folder on its PYTHONPATH.

    The folder has nothing but this package and its entry point, so that a server sees no other package of
    this process's environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / "tailrace"
    package.unlink(missing_ok=True)
    package.symlink_to(Path(__file__).parent.parent)
    info = folder / "tailrace_plugin-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tailrace-plugin\nVersion: 0\n")
    entry = f"{BACKEND} = tailrace.weights.vllm_plugin:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return folder
