"""Conversion to FTW, in the source's layout or FreeToken's, and verification of what was written.

Imports: `ftw.checkpoint`, `ftw.layouts`, `ftw.verdict`, `ftw.readers` for the format, and what lies below. No torch.
"""

from ftw.conversion.conversion import convert
from ftw.conversion.result import ConversionResult
from ftw.conversion.target import no_room
from ftw.conversion.verification import VerifyResult, verify

__all__ = ["ConversionResult", "VerifyResult", "convert", "no_room", "verify"]
