"""A repository on the hub as a folder: listed once, its files read by ranges or fetched into the local cache.

Imports: `ftw.files`. No torch.
"""

from ftw.hub.errors import http_errors, is_unreachable, refusal
from ftw.hub.fetch import fetch_snapshot
from ftw.hub.path import (
    HubId,
    HubPath,
    HubRepository,
    list_repository,
    open_named_file,
    open_weight_file,
    parse_hub_id,
    prefetch,
)
from ftw.hub.retry import wait_to_retry

__all__ = [
    "HubId",
    "HubPath",
    "HubRepository",
    "fetch_snapshot",
    "http_errors",
    "is_unreachable",
    "list_repository",
    "open_named_file",
    "open_weight_file",
    "parse_hub_id",
    "prefetch",
    "refusal",
    "wait_to_retry",
]
