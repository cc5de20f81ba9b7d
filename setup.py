"""Finds the packages below `ftw/`; `cli/` and `bench/` lie beside it and are installed as `ftw.cli` and `ftw.bench`."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["ftw", "ftw.*"]), "ftw.cli", "ftw.bench"])
