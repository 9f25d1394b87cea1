"""What pyproject.toml cannot say: `runners/` is installed inside the package, for `bench` to find.

Its files are programs that are copied to the target, so in the source they stand apart; installed, the only importable name is
`onnx_gconv`.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["onnx_gconv*"]), "onnx_gconv.deploy.runners"],
    package_dir={"onnx_gconv.deploy.runners": "runners"},
)
