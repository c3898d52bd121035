"""``python -m onnx_sparseconv``."""

from onnx_sparseconv.cli import main

if __name__ == "__main__":
    main()
