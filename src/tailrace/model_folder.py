"""Checks of a Hugging Face model folder by its JSON files and the headers of its weight files.

This imports no torch and loads no weights, so a damaged folder is refused before anything starts.
"""

import json
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from tailrace.errors import ConfigError
from tailrace.importing import check_training

_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
_OPTIONAL = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_OLD = {"n_embd": _SIZES[0], "n_layer": _SIZES[1], "num_layers": _SIZES[1], "n_inner": _OPTIONAL[0]}
_OLD |= {"n_head": _OPTIONAL[1], "num_heads": _OPTIONAL[1], "n_positions": "max_position_embeddings"}
_CONTEXT = "max_position_embeddings"
_GENERATION = "generation_config.json"
_WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.jsonl)(?<!\.parquet)")
_RUN_FILES = "config.toml", ".tailrace"
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")
HUB_LIMIT_S = 10.0
"""Seconds in which the hub answers the first question after a model or a data set."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_SAVE = "save the model with `save_pretrained`"
_TEXT = r"(?:(?:(?:language_|text_)?model|gpt_neox|transformer|decoder|backbone)\.)*"
_BLOCK = re.compile(_TEXT + r"(?:layers|h)\.(\d+)\.")
_TIED = re.compile(_TEXT + r"(?:embed_tokens|wte|embed_in)\.weight")
_DRAFT = re.compile(r"(^|\.)mtp\w*\.")
_CODES, _PACKED = re.compile(r"F[468](_\w+)?|[UI]8"), (".qweight", ".weight_packed")
"""Types of quantised weights, and last names of those that are packed into other types."""
COMPUTED = re.compile(r"\b(\w*inv_freq|\w+_cached|att(entio)?n\.((masked_)?bias|causal_mask)|position_ids)$")
"""Buffers that old checkpoints contain; models compute them."""
NOT_OF_TEXT = re.compile(r"\b((visual|(embed_)?(vision|audio)\w*|\w+_projector|connector)\.|image_newline$)")
"""Tensors for images and sounds."""


def is_hub_id(name: str) -> bool:
    """Whether this may be the id of a model or a data set on the Hugging Face hub."""
    return _HUB_ID.fullmatch(name) is not None


def path_or_hub_id(folder: Path, text: str) -> str:
    """Resolve a path relative to a folder, unless it is an id on the hub and there is no such path."""
    path = folder / text
    return text if is_hub_id(text) and not path.exists() else str(path.resolve())


def model_name(path: Path | str) -> str:
    """Return the id on the hub of a model, or else the name of its folder: nothing else of its path."""
    if cached := _SNAPSHOT.search(str(path)):
        return "/".join(cached.groups())
    return str(path) if is_hub_id(str(path)) else Path(path).name


def find_folder(path: Path) -> Path:
    """The folder of a model that is named by its path, by the output directory of the run that trained it,
    or by its id on the Hugging Face hub: then it is taken from the cache, or downloaded into it. Raises a
    ConfigError if there is no such folder, and the hub does not give it, and as `check_training`."""
    name = str(path)
    if any((path / name).is_file() for name in _RUN_FILES) and not (path / "config.json").is_file():
        if not (path / "model").is_dir():
            writer = "tailrace wrote it" if (path / ".tailrace").is_file() else "it has a config.toml"
            remedy = "name a run of tailrace train or sft that has saved one, or the model itself"
            raise folder_error(path, f"{writer}, and no model in it", remedy)
        return path / "model"
    if not is_hub_id(name) or path.exists():
        return path
    check_training("model.path", name)
    return hub_snapshot("model.path", name, "model", _HUB_FILES, check=weight_files)


def hub_snapshot(
    key: str,
    name: str,
    what: str,
    files: list[str],
    *,
    repo_type: str = "model",
    revision: str | None = None,
    check: Callable[[Path], object] = Path.exists,
) -> Path:
    """Return the folder of a model or a data set of the Hugging Face hub. It is taken from the cache, or
    downloaded into it. Its name is that of the commit. Raises a ConfigError if the hub does not give it, or
    does not answer for HUB_LIMIT_S.

    Args:
        key: that names it. `what`: it is, in words.
        files: patterns of the names of its files.
        repo_type: "model" or "dataset".
        revision: a commit, a branch or a tag; None: the newest commit.
        check: raises a ConfigError of a cached folder that is not whole.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    download = partial(snapshot_download, name, repo_type=repo_type, revision=revision)
    try:
        cached = Path(download(allow_patterns=files, local_files_only=True))
        check(cached)
        return cached
    except (LocalEntryNotFoundError, ConfigError):  # it is not there, or not whole
        pass
    there_is_none = f"there is no such {'folder' if what == 'model' else 'file or folder'}"
    try:
        # The download alone has no limit for its first question.
        HfApi().repo_info(name, repo_type=repo_type, revision=revision, timeout=HUB_LIMIT_S)
        return Path(download(allow_patterns=files))
    except Exception as why:  # of the hub, of the network, or of HF_HUB_OFFLINE
        problem = f"{there_is_none}, and the Hugging Face hub gives no such {what} ({why})"
        remedy = "name a folder, or, where there is a network, unset HF_HUB_OFFLINE"
        if isinstance(why, RepositoryNotFoundError):  # or, a subclass, it is gated
            problem = f"{there_is_none}, and the Hugging Face hub gives no such {what} to this account"
            remedy = f"correct it; to a gated or private {what} ask for access on its page, and set HF_TOKEN"
        if isinstance(why, RevisionNotFoundError):
            problem = f"the Hugging Face hub has no revision {revision!r} of it"
            remedy = "name a commit, a branch or a tag of it, or none for the newest commit"
        raise ConfigError(key, name, problem, remedy) from why


def read_config(path: Path) -> dict[str, Any]:
    """The content of config.json. Raises a ConfigError if there is no such object, or there is an adapter."""
    if not path.is_dir():
        raise folder_error(path, "there is no such folder", "name a Hugging Face model folder")
    for each in sorted(path.iterdir()):
        if each.exists() and not each.is_file() and not each.is_dir():  # to open a pipe waits for ever
            raise folder_error(path, f"{each.name} is a pipe or a device", "copy the folder again")
    if (path / "adapter_config.json").is_file():
        problem = (
            "adapter_config.json: transformers would add this adapter to its base, and engines would not"
        )
        raise folder_error(path, problem, "merge it (merge_and_unload of peft), or move its files away")
    if not (path / "config.json").is_file():
        raise folder_error(path, "the folder has no config.json")
    config = _read_object(path, "config.json")
    text = config.get("text_config")  # of a model that reads images, too
    config = {**(text if isinstance(text, dict) else {}), **config}
    if isinstance(layers := config.get("layers_block_type"), list):  # one entry a layer
        config.setdefault("num_hidden_layers", len(layers))
    return {_OLD.get(name, name): value for name, value in config.items()}


def check_files(path: Path) -> None:
    """Check the values and the files of a model folder, whatever its architecture. Raises a ConfigError if a
    file is missing or damaged, a value in it is impossible, its weights are quantised, or it has more layers
    than config.json says. The message names the file."""
    config, _ = read_config(path), context_length(path)
    for problem in _impossible(config):
        raise folder_error(path, f"config.json: {problem}")
    size = config["vocab_size"]
    if outside := sorted(id for id in end_of_text_ids(path) if id >= size):
        raise folder_error(path, f"eos_token_id {outside[0]} is outside of the vocabulary of {size} tokens")
    highest = max(filter(_is_size, _token_ids(path).values()), default=-1)
    if highest >= size:
        problem = f"config.json: vocab_size = {size}, but tokenizer.json has ids up to {highest}"
        raise folder_error(path, problem, "put the model's own tokenizer into the folder")
    shapes = tensor_shapes(path)
    check_all_used(path, [name for name in shapes if _block(name) >= config["num_hidden_layers"]])
    said = "" if config.get("quantization_config") is None else "config.json: quantization_config"
    for name, shape, dtype in (header for file in weight_files(path) for header in tensor_headers(file)):
        is_code = len(shape) > 1 and _CODES.fullmatch(dtype) and not COMPUTED.search(name)
        said = said or (f"{name} is {dtype}" if is_code or name.endswith(_PACKED) else "")
    if said:
        problem = f"{said}: quantised weights are neither trained nor served"
        raise folder_error(path, problem, "name the model that they were made from, or a dequantised copy")
    if (rows := shapes.get(_EMBEDDING, (size,))[0]) != size:
        raise folder_error(path, f"config.json: vocab_size = {size}, but {_EMBEDDING} has {rows} rows")
    tied = [name for name in shapes if _TIED.fullmatch(name)] if config.get("tie_word_embeddings") else []
    if _HEAD in shapes and any(_bytes_of(path, _HEAD) != _bytes_of(path, name) for name in tied):
        problem = f"config.json: tie_word_embeddings = true, but the weights have another {_HEAD}"
        remedy = f"set tie_word_embeddings to false if {_HEAD} is right, else remove it from the weights"
        raise folder_error(path, problem, remedy)


def context_length(path: Path) -> int:
    """The longest sequence of the model, prompt included. Raises a ConfigError if config.json does not say
    it."""
    length = read_config(path).get(_CONTEXT)
    if not _is_size(length):
        problem = f"config.json: {_CONTEXT} = {length!r} must be a whole number of at least 1"
        raise folder_error(path, problem, "write the longest sequence that you need")
    return length


def weight_files(path: Path) -> list[Path]:
    """The files with the weights of a model folder, as transformers chooses them: those of the index, or
    model.safetensors; else all safetensors. Raises a ConfigError if there are none, one that the index names
    is missing, or it does not name model.safetensors, which is there."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise folder_error(path, "the folder has no safetensors weights")
    names = {file.name for file in files}
    if not (path / INDEX).is_file():
        return [path / _WEIGHTS] if _WEIGHTS in names else files
    shards = _read_object(path, INDEX).get("weight_map")
    named = set(map(str, shards.values())) if isinstance(shards, dict) else {"the weight_map"}
    for missing in sorted(named - names):
        raise folder_error(path, f"{INDEX}: {missing} is missing", "copy the folder again")
    if _WEIGHTS in names - named:
        raise folder_error(
            path, f"{INDEX} does not name {_WEIGHTS}", "remove the one that is not the model's"
        )
    return [file for file in files if file.name in named]


def draft_tensors(path: Path) -> dict[str, Path]:
    """The tensors, with files, of layers that predict several tokens (MTP), which transformers' models leave
    out: named mtp, or of `num_nextn_predict_layers` layers after the last. Raises as `tensor_shapes`."""
    config, _ = read_config(path), tensor_shapes(path)
    return {n: file for file in weight_files(path) for n, *_ in tensor_headers(file) if _is_draft(n, config)}


def check_all_used(path: Path, unused: Collection[str]) -> None:
    """Check the tensors of a folder that the model of its config.json does not take. Raises a ConfigError if
    they are more than drafts, parts for images and sounds, and what models compute themselves."""
    config = read_config(path)
    known = {_HEAD} if config.get("tie_word_embeddings") else set()  # `check_files` compares it
    known |= {n for n in unused if _is_draft(n, config) or NOT_OF_TEXT.search(n) or COMPUTED.search(n)}
    if wrong := sorted(set(unused) - known):
        named = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        problem = f"config.json: the model that it describes has no place for {len(wrong)} weights ({named})"
        remedy = "put the weights' own config.json into the folder, or remove a value head or a classifier"
        raise folder_error(path, problem, remedy)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a model folder by their names, from the headers of its files. Raises a
    ConfigError if a file is missing or damaged."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        if defect := weights_defect(file):
            raise folder_error(path, f"{file.name} {defect}", "copy the file again")
        shapes |= {name: shape for name, shape, _ in tensor_headers(file)}
    return shapes


def tensor_headers(file: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of each tensor of a safetensors file, without reading a tensor. The types are
    those of safetensors, such as "BF16". Raises an OSError or a SafetensorError if the file cannot be
    read."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()]


def weights_defect(file: Path) -> str | None:
    """Return the defect of a safetensors file, by its size and header, to follow its name, or None."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return None if tensors.keys() else "holds no tensors"
    except (OSError, SafetensorError) as why:
        return f"is damaged ({why})"


def end_of_text_ids(path: Path) -> frozenset[int]:
    """The tokens that end a text: of generation_config.json and of config.json, and the tokenizer's. Raises a
    ConfigError if they are not token ids."""
    ids = _ends_in(path, _GENERATION) | _ends_in(path, "config.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_object(path, name).get("eos_token") if (path / name).is_file() else None
        if token is not None:
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str):
                raise folder_error(path, f"{name}: eos_token = {token!r} names no token")
            id = _token_ids(path).get(text)
            return frozenset(ids | {id} if isinstance(id, int) else ids)
    return frozenset(ids)


def end_texts_with(path: Path, ids: Collection[int]) -> set[str]:
    """Let tokens end a text in generation_config.json, where transformers and servers look for them, beside
    those that do. Return the names of the files that had to be changed."""
    if _ends_in(path, _GENERATION) >= set(ids):
        return set()
    content = _read_object(path, _GENERATION) if (path / _GENERATION).is_file() else {}
    content |= {"eos_token_id": sorted(end_of_text_ids(path).union(ids))}
    (path / _GENERATION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return {_GENERATION}


def _ends_in(path: Path, name: str) -> set[int]:
    value = _read_object(path, name).get("eos_token_id") if (path / name).is_file() else None
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(id == 0 or _is_size(id) for id in found):
        problem = f"{name}: eos_token_id = {value!r} is neither a token id nor a list of them"
        raise folder_error(path, problem)
    return set(found)


def asks_for_date(path: Path) -> bool:
    """Whether the chat template of a model folder asks for the date."""
    files = (path / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    return any(b"strftime_now" in file.read_bytes() for file in files if file.is_file())


def rope_section(config: dict[str, Any]) -> Any:
    """The section of config.json on the rotary embedding; its name depends on transformers' version."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def folder_error(path: Path, problem: str, remedy: str = _SAVE) -> ConfigError:
    """A ConfigError of the setting model.path."""
    return ConfigError("model.path", str(path), problem, remedy)


def _read_object(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((path / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise folder_error(path, f"{name} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise folder_error(path, f"{name} is not a JSON object")
    return content


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_draft(name: str, config: dict[str, Any]) -> bool:
    first, more = config["num_hidden_layers"], config.get("num_nextn_predict_layers")
    return bool(_DRAFT.search(name)) or first <= _block(name) < first + (more if _is_size(more) else 0)


def _block(name: str) -> int:
    """The number of the layer of the text model that a tensor is of; -1: of none."""
    found = _BLOCK.match(name)
    return int(found[1]) if found else -1


def _impossible(config: dict[str, Any]) -> list[str]:
    """Return the values of config.json that no model may have, each with what it must be."""
    given = {name: config[name] for name in _OPTIONAL if config.get(name) is not None}
    sizes = {name: config.get(name) for name in _SIZES} | given
    wrong = {name: value for name, value in sizes.items() if not _is_size(value)}
    if wrong:
        return [f"{name} = {value!r} must be a whole number of at least 1" for name, value in wrong.items()]
    heads, hidden, rope = given.get("num_attention_heads", 1), config["hidden_size"], rope_section(config)
    if not isinstance(rope, dict):
        return [f"the rope section {rope!r} must be an object"]
    factors = {"rms_norm_eps": config.get("rms_norm_eps"), "rope_theta": config.get("rope_theta")} | rope
    problems = [
        f"{name} = {factors[name]!r} must be a positive number"
        for name in ("rms_norm_eps", "rope_theta", "factor")
        if factors.get(name) is not None and not _is_positive(factors[name])
    ]
    if heads % given.get("num_key_value_heads", heads):
        problems.append(f"num_attention_heads = {heads} must be a multiple of num_key_value_heads")
    if "head_dim" not in given and hidden % heads:
        problems.append(f"hidden_size = {hidden} must be a multiple of num_attention_heads")
    if given.get("head_dim", hidden // heads) % 2:
        problems.append("the size of an attention head must be even")
    return problems


def _token_ids(path: Path) -> dict[str, Any]:
    """The tokens of the folder's tokenizer with what it says is their ids; none where there is none."""
    if not (path / "tokenizer.json").is_file():
        return {}
    tokenizer = _read_object(path, "tokenizer.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = {str(each): id for id, each in enumerate(vocabulary)} if isinstance(vocabulary, list) else {}
    ids |= vocabulary if isinstance(vocabulary, dict) else {}
    named = (token for token in added if isinstance(token, dict)) if isinstance(added, list) else ()
    return ids | {str(token.get("content")): token.get("id") for token in named}


def _bytes_of(path: Path, name: str) -> bytes:
    """A tensor of a checked folder, with its type and shape."""
    file = next(file for file in weight_files(path) if name in {each for each, *_ in tensor_headers(file)})
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        info = json.loads(content.read(length))[name]
        start, end = info["data_offsets"]
        content.seek(8 + length + start)
        return f"{info['dtype']} {info['shape']} ".encode() + content.read(end - start)
