"""The operating system: memory by the page, its limits and NUMA nodes, locks, threads, files that are whole or absent.

Imports: the ground files (`errors`, `sizes`, `dtypes`, `tensors`, `ggml_types`), as every room does. No torch.
"""

from ftw.host.atomic_write import fsync_folder, temporary_name, write_atomically
from ftw.host.disk import check_file_can_be_made, free_disk_nbytes
from ftw.host.file_io import (
    DIRECT_REFUSALS,
    end_direct,
    is_cached,
    read_at,
    write_at,
)
from ftw.host.limits import HostLimits, read_host_limits
from ftw.host.memory import (
    HUGE_PAGE_NBYTES,
    PAGE_NBYTES,
    HostMemory,
    Memory,
    address_of,
    max_resident_nbytes,
    resident_nbytes,
)
from ftw.host.numa import count_pages_by_node, node_of_pci_device
from ftw.host.open_folder import OpenFolder
from ftw.host.ownership import granted, granted_by, is_own, is_own_or_roots, owner_of
from ftw.host.safe_open import is_link, open_direct_to_read, open_to_read
from ftw.host.threads import count_processors, start_threads

__all__ = [
    "DIRECT_REFUSALS", "HUGE_PAGE_NBYTES", "PAGE_NBYTES", "HostLimits", "HostMemory", "Memory", "OpenFolder",
    "address_of", "check_file_can_be_made", "count_pages_by_node", "count_processors", "end_direct",
    "free_disk_nbytes", "fsync_folder", "granted", "granted_by", "is_cached", "is_link", "is_own", "is_own_or_roots",
    "max_resident_nbytes", "node_of_pci_device", "open_direct_to_read", "open_to_read", "owner_of", "read_at",
    "read_host_limits", "resident_nbytes", "start_threads", "temporary_name", "write_at", "write_atomically",
]  # fmt: skip
