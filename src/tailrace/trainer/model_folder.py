"""Reading a Hugging Face model folder. Errors name the file that is at fault."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel


class UnreadableModel(Exception):
    """A folder does not contain a complete model. The message names the file and the defect."""


def read_model(folder: Path) -> PreTrainedModel:
    """Load a causal language model in float32.

    Raises:
        UnreadableModel: a file is missing or damaged, or config.json and the weights do not fit together.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers has no common error for a bad folder
        raise UnreadableModel(_defect(folder, error)) from error
    # transformers fills missing and mismatched weights with random numbers.
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if wrong:
        names = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        raise UnreadableModel(
            f"{folder / 'config.json'} does not fit the weights: {len(wrong)} are missing or have another "
            f"shape ({names})"
        )
    return model


def _defect(folder: Path, error: Exception) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as damage:
            return f"{file} is damaged ({damage})"
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, OSError):  # it names the file itself
        return reason
    return (
        f"{folder / 'config.json'} describes no model that can be loaded ({type(error).__name__}: {reason})"
    )
