"""Where a checkpoint lies: on this machine, or on the hub, read there by ranges or fetched into the local cache.

Imports: `ftw.files`. No torch.
"""

from ftw.hub.errors import http_errors, is_unreachable, refusal, wait_to_retry
from ftw.hub.fetch import fetch_snapshot
from ftw.hub.ids import HubId, parse_hub_address, parse_hub_id
from ftw.hub.path import HubPath
from ftw.hub.place import Place, open_weight_file
from ftw.hub.redaction import presentable
from ftw.hub.repository import HubRepository, list_repository

__all__ = [
    "HubId", "HubPath", "HubRepository", "Place", "fetch_snapshot", "http_errors", "is_unreachable", "list_repository",
    "open_weight_file", "parse_hub_address", "parse_hub_id", "presentable", "refusal", "wait_to_retry",
]  # fmt: skip
