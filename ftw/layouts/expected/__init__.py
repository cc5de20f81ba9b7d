"""What FreeToken's model of a configuration expects: each name, shape and type, and what the configuration may say.

Imports: `ftw.files`, `ftw.checkpoint`, `ftw.layouts.recipes`, `ftw.layouts.families`. No torch.
"""
