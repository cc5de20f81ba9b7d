"""The families of models that FreeToken serves (`table`).

Imports: `ftw.checkpoint`, `ftw.conversion.recipes`. No torch.
"""
