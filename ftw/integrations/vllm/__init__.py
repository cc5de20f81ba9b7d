"""vLLM's plug-in: the token embedding in page-locked host memory, while all else of vLLM stays as it is.

vLLM calls `register` in each of its processes, by the entry point group "vllm.general_plugins". Until a model is loaded
for which it was asked, nothing of ftw's but this and a few light modules is imported.
"""

from ftw.integrations.vllm.plugin import register

__all__ = ["register"]
