"""A repository on the hub as a folder: listed once, its files read by ranges or fetched into the local cache.

Imports: `ftw.files`. No torch.
"""

from ftw.hub.errors import http_errors, is_unreachable, refusal, wait_to_retry
from ftw.hub.fetch import fetch_snapshot
from ftw.hub.ids import HubId, parse_hub_id
from ftw.hub.opening import open_named_file, open_weight_file, prefetch_headers
from ftw.hub.path import HubPath
from ftw.hub.repository import HubRepository, list_repository

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
    "prefetch_headers",
    "refusal",
    "wait_to_retry",
]
