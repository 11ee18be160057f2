"""The model's folder: what the engine is pointed at."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from kvladder.config.experiment import ModelConfig


class ModelError(RuntimeError):
    """A model that can't be had; the message says where it was looked for."""


def make(model: ModelConfig, folder: Path, python: Path) -> None:
    """Write ``config.json`` for generated weights, or link a checkpoint's files; ``python`` is the stack's.

    Raises ModelError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.shape is not None:
        shape = {"dtype": model.dtype, "torch_dtype": model.dtype, **model.shape}
        (folder / "config.json").write_text(json.dumps(shape, indent=1) + "\n", encoding="utf-8")
        return
    assert model.path is not None  # noqa: S101 (ModelConfig: no shape means a path)
    source = Path(model.path).expanduser().absolute()
    if not (source / "config.json").is_file():
        source = _from_hub(model.path, python)
    for path in sorted(source.iterdir()):
        link = folder / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)


def _from_hub(name: str, python: Path) -> Path:
    code = "import sys; from huggingface_hub import snapshot_download; print(snapshot_download(sys.argv[1]))"
    done = subprocess.run([str(python), "-c", code, name], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(f"model.path: {name!r} is neither a folder with a config.json nor a model that the hub gives")
    return Path(done.stdout.strip().splitlines()[-1])
