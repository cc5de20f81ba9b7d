"""The operating system: memory by the page, its limits and NUMA nodes, locks, threads, files that are whole or absent.

Imports: the ground files (`errors`, `sizes`, `dtypes`, `tensors`, `ggml_types`), as every room does. No torch.
"""

from ftw.host import file_lock
from ftw.host.atomic_write import fsync_folder, write_atomically
from ftw.host.file_io import (
    DIRECT_REFUSALS,
    end_direct,
    is_cached,
    open_descriptor,
    open_direct,
    read_at,
    write_at,
)
from ftw.host.libc import exchange_names
from ftw.host.limits import HostLimits, read_host_limits
from ftw.host.memory import HUGE_PAGE_NBYTES, PAGE_NBYTES, HostMemory, Memory, address_of
from ftw.host.numa import count_pages_by_node, node_of_pci_device
from ftw.host.resident import max_resident_nbytes, resident_nbytes
from ftw.host.safe_open import is_link, open_direct_to_read, open_to_read
from ftw.host.threads import count_processors, start_threads

__all__ = [
    "DIRECT_REFUSALS", "HUGE_PAGE_NBYTES", "PAGE_NBYTES", "HostLimits", "HostMemory", "Memory", "address_of",
    "count_pages_by_node", "count_processors", "end_direct", "exchange_names", "file_lock", "fsync_folder", "is_cached",
    "is_link", "max_resident_nbytes", "node_of_pci_device", "open_descriptor", "open_direct", "open_direct_to_read",
    "open_to_read", "read_at", "read_host_limits", "resident_nbytes", "start_threads", "write_at",
    "write_atomically",
]  # fmt: skip
