"""Operations on the device. One op, one name: `<op>.py` checks and launches, `<op>_triton.py` is the kernel alone, and
`<op>_reference.py` is slow and obvious."""  # noqa: D205, D209
