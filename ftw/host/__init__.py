"""The operating system: memory by the page, its limits and NUMA nodes, locks, threads, files that are whole or absent.

Imports: the ground files (`errors`, `sizes`, `dtypes`, `tensors`, `ggml_types`), as every room does. No torch.
"""

from ftw.host import file_lock
from ftw.host.atomic_write import fsync_folder, write_atomically
from ftw.host.libc import exchange_names
from ftw.host.limits import HostLimits, read_host_limits
from ftw.host.memory import HUGE_PAGE_NBYTES, PAGE_NBYTES, HostMemory, Memory, address_of
from ftw.host.numa import count_pages_by_node, node_of_pci_device
from ftw.host.threads import start_threads

__all__ = [
    "HUGE_PAGE_NBYTES",
    "PAGE_NBYTES",
    "HostLimits",
    "HostMemory",
    "Memory",
    "address_of",
    "count_pages_by_node",
    "exchange_names",
    "file_lock",
    "fsync_folder",
    "node_of_pci_device",
    "read_host_limits",
    "start_threads",
    "write_atomically",
]
