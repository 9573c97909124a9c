"""New weights as a client names them, checked before the engine is asked to load them.

They are safetensors files below one folder, or the address of a process group (weights/process_group.py).
Nothing else is read: no pickle, and no file from elsewhere.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator
from safetensors import SafetensorError

from tailrace.errors import ConfigError, WeightsRefused
from tailrace.model_folder import tensor_headers, weight_files
from tailrace.weights.base import Link, TensorInfo, Weights, check_tensors

_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


class UpdateInfo(BaseModel):
    """What a client sends. The client of engine/vllm.py puts all but the link into `weights`.

    Args:
        location: a safetensors file, or a folder of such files; or the location of a streamed publication.
        tensors: name, shape and type of each tensor of a streamed publication, in the order of sending.
        link: engine, number and num_ranks of the Link of a streamed publication.
    """

    location: str
    tensors: list[tuple[str, tuple[int, ...], str]] = []
    link: tuple[str, int, int] = ("engine", 0, 1)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, body: dict[str, Any]) -> dict[str, Any]:
        weights = body.get("weights")
        return body | weights if isinstance(weights, dict) else body


class OfferedWeights:
    """Turns what clients send into what the engine loads.

    Args:
        root: all files lie below it, also those that symbolic links lead to. None: no files are read.
        expected: the tensors of the served model.
    """

    def __init__(self, root: Path | None, expected: Iterable[TensorInfo]) -> None:
        self._root, self._expected = root and root.resolve(), tuple(expected)

    def check(self, body: dict[str, Any], number: int) -> tuple[Weights, Link]:
        """Check a publication.

        Args:
            number: it gets this version.

        Raises:
            WeightsRefused: it cannot be read, or its tensors are not those of the model.
        """
        try:
            info = UpdateInfo.model_validate(body)
        except ValidationError as why:
            defect = why.errors()[0]
            raise WeightsRefused(f"{'.'.join(map(str, defect['loc']))}: {defect['msg']}") from None
        weights, link = Weights(number, info.location, _infos(info.tensors)), Link(*info.link)
        if not weights.is_streamed:
            path = self._path(info.location)
            weights = Weights(number, str(path), tuple(_headers(self._files(path))))
        check_tensors(weights.tensors, self._expected)
        return weights, link

    def _path(self, location: str) -> Path:
        if self._root is None:
            raise WeightsRefused("this server reads no files; start it with --weights-folder")
        try:
            path = (self._root / location).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            path = None
        if path is None or not path.is_relative_to(self._root):
            raise WeightsRefused(f"there is no {location!r} below the server's --weights-folder")
        return path

    def _files(self, path: Path) -> list[Path]:
        try:
            files = weight_files(path) if path.is_dir() else [path]
        except ConfigError as why:
            raise WeightsRefused(why.problem) from None
        for file in files:
            if file.suffix != ".safetensors" or not file.is_file():
                raise WeightsRefused(f"{file.name!r} is not a .safetensors file; no other format is read")
            self._path(str(file))
        return files


def _infos(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, shape, dtype) for name, shape, dtype in tensors)  # type: ignore[arg-type]


def _headers(files: Iterable[Path]) -> Iterable[TensorInfo]:
    """What the files contain, without reading a tensor."""
    for file in files:
        try:
            yield from _infos(
                (name, shape, _DTYPES.get(kind, kind)) for name, shape, kind in tensor_headers(file)
            )
        except (SafetensorError, OSError) as why:
            raise WeightsRefused(f"{file.name!r} cannot be read: {why}") from None
