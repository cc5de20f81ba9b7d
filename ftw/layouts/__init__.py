"""Which tensors an FTW gets: those of a checkpoint as they are, or as FreeToken's models load them.

Imports: `ftw.checkpoint` and what that imports. No torch; numpy where bytes are made.
"""

from ftw.layouts.layout import LAYOUT_KEY, Arrangement, Layout, SideFile, arrange, find_obstacle, layout_of

__all__ = ["LAYOUT_KEY", "Arrangement", "Layout", "SideFile", "arrange", "find_obstacle", "layout_of"]
