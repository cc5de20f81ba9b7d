"""FreeToken's layout: the tensors of a checkpoint fused, renamed and gathered in banks as FreeToken's models load them.

Imports: `ftw.checkpoint` and what that imports, `ftw.layouts.families`, `ftw.layouts.recipes`. No torch.
"""
