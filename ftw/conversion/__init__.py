"""Conversion to FTW, in the source's layout or FreeToken's, and verification of what was written.

Imports: `ftw.checkpoint`, `ftw.verdict`, `ftw.readers` for the format, `ftw.host`, `ftw.files`. No torch.
"""

from ftw.conversion.conversion import convert
from ftw.conversion.layouts import Layout
from ftw.conversion.result import ConversionResult
from ftw.conversion.target import no_room
from ftw.conversion.verification import VerifyResult, verify

__all__ = ["ConversionResult", "Layout", "VerifyResult", "convert", "no_room", "verify"]
