"""Settings: what a user asks of the plug-in.

    FTW_EMBED=host|auto|gpu                                                 in the environment of every process
    --additional-config '{"ftw": {"embed": "host", "hot_bytes": "64MiB"}}'  the same, and hot rows; it has the last word
    --load-format ftw                                                       "auto", if neither of them says anything

"gpu", and nothing at all, leave vLLM as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftw.sizes import parse_nbytes

ENVIRONMENT = "FTW_EMBED"
CONFIG_KEY = "ftw"
LOAD_FORMAT = "ftw"
_CHOICES = ("host", "auto", "gpu")
_KEYS = ("embed", "hot_bytes", "follow_links")
_SUBJECT = f"additional config: {CONFIG_KEY}"


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for.

    Attributes:
        embed: "host" insists that the token embedding leaves the GPU, "auto" does it if it may.
        hot_bytes: Of its rows that are used most, which the GPU keeps.
        follow_links: Whether links may lead out of the checkpoint's folder, as vLLM itself lets them.
    """

    embed: str
    hot_bytes: int | None = None
    follow_links: bool = False

    @property
    def must_move(self) -> bool:
        """Whether a table that stays ends the start."""
        return self.embed == "host"


def find_settings(environ: Mapping[str, str], additional_config: Any, load_format: str) -> Settings | None:
    """Return what was asked for; None if nothing was.

    Args:
        environ: The environment of the process.
        additional_config: vLLM's; not always a dictionary.
        load_format: vLLM's.

    Raises:
        ValueError: What was asked for is not one of the choices.
    """
    given = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
    if given is None:
        embed = environ.get(ENVIRONMENT) or ("auto" if load_format == LOAD_FORMAT else "gpu")
        _check_choice(ENVIRONMENT, embed)
        return None if embed == "gpu" else Settings(embed)
    if not isinstance(given, Mapping):
        raise ValueError(f"{_SUBJECT}: found {given!r}, such as {{'embed': 'host'}} is needed")  # noqa: TRY004
    unknown = [key for key in given if key not in _KEYS]
    if unknown:
        raise ValueError(f"{_SUBJECT}: found {unknown[0]!r}, allowed are {', '.join(_KEYS)}")
    embed = given.get("embed", environ.get(ENVIRONMENT) or "gpu")
    _check_choice(f"{_SUBJECT}: embed", embed)
    hot_bytes = parse_nbytes(f"{_SUBJECT}: hot_bytes", given.get("hot_bytes"))
    follow_links = given.get("follow_links", False)
    if not isinstance(follow_links, bool):
        raise ValueError(f"{_SUBJECT}: follow_links: found {follow_links!r}, true or false is needed")  # noqa: TRY004
    if embed != "gpu":
        return Settings(embed, hot_bytes, follow_links)
    if hot_bytes:
        raise ValueError(
            f"{_SUBJECT}: hot_bytes: with embed 'gpu' there is no table in host memory; host, auto have one"
        )
    return None


def _check_choice(subject: str, embed: object) -> None:
    if embed not in _CHOICES:
        raise ValueError(f"{subject}: found {embed!r}, allowed are {', '.join(_CHOICES)}")
