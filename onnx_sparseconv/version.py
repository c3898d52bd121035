"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("onnx-sparseconv")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
