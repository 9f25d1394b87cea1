"""Optional packages, asked for before any work is done."""

from onnx_gconv.errors import DependencyError


def require_torch(what: str) -> None:
    """Refuse where PyTorch is not installed, before anything else is done."""
    try:
        import onnx_gconv.torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch":
            raise
        raise DependencyError(f"{what} needs PyTorch, which is not installed.", hint="pip install 'torch>=2.4'") from error
