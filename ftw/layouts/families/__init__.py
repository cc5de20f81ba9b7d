"""The families of models that FreeToken serves (`table`).

Imports: `ftw.files`, `ftw.checkpoint`, `ftw.layouts.recipes`. No torch.
"""
