"""Files of weights that a client names: safetensors files below one folder, and nothing else."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from tailrace.errors import WeightsRefused

SUFFIX = ".safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}


def checked_location(root: Path | None, location: str) -> Path:
    """The file or folder that a client names.

    Args:
        root: all files lie below it, also those that symbolic links lead to.
        location: absolute, or relative to the root.

    Raises:
        WeightsRefused: there is no such file below the root, or it is not a safetensors file of floats.
    """
    if root is None:
        raise WeightsRefused("this server reads no files; start it with --weights-folder")
    try:
        path = (root / location).resolve(strict=True)
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        resolved = [file.resolve(strict=True) for file in files]
    except (OSError, ValueError, RuntimeError):
        raise WeightsRefused(f"there is no file {location!r} below the server's --weights-folder") from None
    if not all(file.is_relative_to(root.resolve()) for file in (path, *resolved)):
        raise WeightsRefused(f"there is no file {location!r} below the server's --weights-folder")
    if not files:
        raise WeightsRefused(f"{location!r} has no {SUFFIX} files")
    for file in resolved:
        _check_file(file)
    return path


def _check_file(file: Path) -> None:
    if file.suffix != SUFFIX or not file.is_file():
        raise WeightsRefused(f"{file.name!r} is not a {SUFFIX} file; no other format is read")
    try:
        with safe_open(file, "np") as tensors:
            dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as why:
        raise WeightsRefused(f"{file.name!r} cannot be read: {why}") from why
    if not dtypes <= _FLOATS:
        raise WeightsRefused(f"{file.name!r} has tensors of the types {', '.join(sorted(dtypes - _FLOATS))}")
