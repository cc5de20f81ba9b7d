import inspect as python_inspect
import subprocess
import sys

import pytest

import ftw

NAMES = """
Checkpoint CheckpointError ClosedError ConversionResult DeviceError FtwError HostEmbedding HostTable LoadedModel
LookupArgumentError MemoryReport ModelConfig NotEligibleError OffloadedModel OutputError PinError Report
SharedMemoryError SourceNotFoundError TensorInfo UnknownTensorError VerifyResult __version__ convert inspect load memory
offload open_checkpoint verify
""".split()


def test_all_is_the_public_api() -> None:
    assert ftw.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(ftw, name)
    if not isinstance(value, str):
        assert python_inspect.getdoc(value)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        ftw.no_such_name  # noqa: B018


def test_functions_stay_functions_when_all_modules_are_imported() -> None:
    script = (
        "import importlib, pkgutil, ftw\n"
        "for found in pkgutil.walk_packages(ftw.__path__, 'ftw.'):\n"
        "    try: importlib.import_module(found.name)\n"
        "    except ModuleNotFoundError as error:\n"  # vLLM is not among what the tests need
        "        if error.name != 'vllm': raise\n"
        "print(sorted(name for name in ftw.__all__ if callable(getattr(ftw, name))))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str([name for name in NAMES if name not in ("__version__", "memory")])


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (ftw.CheckpointError, ValueError),
        (ftw.SourceNotFoundError, FileNotFoundError),
        (ftw.UnknownTensorError, KeyError),
        (ftw.NotEligibleError, ValueError),
        (ftw.OutputError, OSError),
        (ftw.LookupArgumentError, ValueError),
        (ftw.DeviceError, RuntimeError),
        (ftw.PinError, MemoryError),
        (ftw.SharedMemoryError, OSError),
        (ftw.ClosedError, ValueError),
    ],
    ids=lambda value: value.__name__,
)
def test_error_is_an_ftw_error_and_a_builtin_one(error: type[Exception], base: type[Exception]) -> None:
    assert issubclass(error, ftw.FtwError)
    assert issubclass(error, base)


def test_error_message_is_not_quoted() -> None:
    assert str(ftw.UnknownTensorError("a: b: c")) == "a: b: c"


def test_checkpoint_error_survives_pickling() -> None:
    import pickle

    error = ftw.CheckpointError("some/path", "header\n", "is broken")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == r"some/path: header\n: is broken"
    assert copy.path == "some/path"
